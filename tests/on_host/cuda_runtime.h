// Stands in for CUDA's own header where g++ compiles the .cu files: a launch runs its blocks one
// after another, the threads of a block as fibers that change places where they wait for each
// other. They start in turns upwards and downwards, so a missing barrier shows. Shared memory holds
// rubbish when a block starts.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__
#define __launch_bounds__(threads)
#define CUDART_VERSION 13000

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
using cudaStream_t = void*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }
inline cudaError_t cudaSetDevice(int device) {
  return device ? cudaErrorInvalidConfiguration : cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }

inline dim3 threadIdx, blockIdx, blockDim;

namespace eagle2::cuda {
constexpr size_t kMostShared = 48 << 10, kGuard = 1 << 10;  // bytes
inline uint64_t shared_memory[(kMostShared + kGuard) / sizeof(uint64_t)];
}  // namespace eagle2::cuda

namespace on_host {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda on the host: %s\n", what);
  std::abort();
}

// Where threads wait for each other; the votes of all are summed.
struct Meeting {
  unsigned arrived = 0, round = 0;
  uint32_t votes = 0, result = 0;
};

class Block {
 public:
  void run(unsigned threads, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    all_ = {}, warps_.assign((threads + 31) / 32, {});
    while (fibers_.size() < threads) fibers_.push_back(std::make_unique<Fiber>());
    for (unsigned t = 0; t < threads; ++t) start(*fibers_[t]);
    unsigned running = threads;
    for (bool upwards = true; running > 0; upwards = !upwards) {
      progress_ = false;
      for (unsigned i = 0; i < threads; ++i) {
        current_ = upwards ? i : threads - 1 - i;
        if (fibers_[current_]->done) continue;
        threadIdx.x = current_;
        swapcontext(&scheduler_, &fibers_[current_]->context);
        if (fibers_[current_]->done) --running, progress_ = true;
      }
      if (!progress_) fail("a barrier that not all threads reach");
    }
  }

  uint32_t meet_all(uint32_t vote) { return meet(all_, blockDim.x, vote); }
  uint32_t meet_warp(uint32_t vote) { return meet(warps_[current_ / 32], 32, vote); }

 private:
  struct Fiber {
    ucontext_t context;
    bool done;
    std::unique_ptr<char[]> stack{new char[kStack]};
  };
  static constexpr size_t kStack = 32 << 10;

  void start(Fiber& fiber) {
    getcontext(&fiber.context);
    fiber.done = false;
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Block::enter, 0);
  }

  static void enter();

  uint32_t meet(Meeting& meeting, unsigned size, uint32_t vote) {
    unsigned round = meeting.round, self = current_;
    meeting.votes += vote;
    if (++meeting.arrived == size) {
      meeting = {0, round + 1, 0, meeting.votes};
      progress_ = true;
    }
    while (meeting.round == round) {
      swapcontext(&fibers_[self]->context, &scheduler_);
      threadIdx.x = self;
    }
    return meeting.result;
  }

  const std::function<void()>* kernel_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Meeting> warps_;
  Meeting all_;
  ucontext_t scheduler_;
  unsigned current_ = 0;
  bool progress_ = false;
};

inline Block block;

inline void Block::enter() {
  (*block.kernel_)();
  block.fibers_[block.current_]->done = true;
}

inline void run_block(unsigned threads, size_t shared_bytes, const std::function<void()>& kernel) {
  char* memory = reinterpret_cast<char*>(eagle2::cuda::shared_memory);
  std::memset(memory, 0xa5, shared_bytes + eagle2::cuda::kGuard);
  block.run(threads, kernel);
  for (size_t i = 0; i < eagle2::cuda::kGuard; ++i)
    if (memory[shared_bytes + i] != char(0xa5)) fail("a write past the shared memory");
}

}  // namespace on_host

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  dim3 grid = config->gridDim;
  blockDim = config->blockDim;
  if (blockDim.x > 1024 || blockDim.x % 32 || grid.y > 65535 || grid.z > 65535 ||
      config->dynamicSmemBytes > eagle2::cuda::kMostShared)
    return cudaErrorInvalidConfiguration;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x)
        on_host::run_block(blockDim.x, config->dynamicSmemBytes, [&] { kernel(arguments...); });
  return cudaSuccess;
}

inline void __syncthreads() { on_host::block.meet_all(0); }
inline int __syncthreads_count(bool vote) { return int(on_host::block.meet_all(vote)); }
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  return on_host::block.meet_warp(uint32_t(vote) << (threadIdx.x % 32));
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
