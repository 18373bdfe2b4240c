// Included by the .cu files alone.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>

#include "cuda/operators.h"

namespace eagle2::cuda {

constexpr int64_t kSharedBytes = 48 << 10;  // per block, on every GPU without asking for more

extern __shared__ uint64_t shared_memory[];

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// A grid without blocks launches nothing.
template <typename... Parameters, typename... Arguments>
void launch(Stream stream, dim3 grid, int threads, int64_t shared_bytes,
            void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  check(cudaSetDevice(stream.device));  // torch's CUDA runtime is another one than this module's
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(stream.handle);
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

}  // namespace eagle2::cuda
