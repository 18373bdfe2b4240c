#include <cstdint>

#include "cuda/launch.h"

namespace eagle2::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 8;  // rows that a thread reads before it writes

// A cache row as runs of units that move as one.
struct Units {
  int64_t bytes, per_head;
  int64_t step;  // bytes from one to the next; 0: the cache's own stride
};

// The widest unit that all addresses and strides are multiples of.
Units find_units(const CompactKv& args) {
  uint64_t widest = sizeof(uint4) | uint64_t(args.dim * args.element_size);
  for (const CacheBytes& cache : {args.k, args.v}) {
    if (cache.strides[4] != args.element_size) return {args.element_size, args.dim, 0};
    widest |= reinterpret_cast<uintptr_t>(cache.data);
    for (int i = 0; i < 4; ++i) widest |= uint64_t(cache.strides[i]);
  }
  int64_t bytes = int64_t(widest & -widest);
  return {bytes, args.dim * args.element_size / bytes, bytes};
}

// A thread owns one unit of every row, and takes the path in ascending order: what a row held has
// been read before the row is written.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) compact_kv_kernel(CompactKv args, Units units) {
  const CacheBytes& cache = blockIdx.z % 2 ? args.v : args.k;
  uint32_t unit = blockIdx.z / 2 * kThreads + threadIdx.x, per_head = uint32_t(units.per_head);
  bool mine = unit / per_head < args.kv_heads;
  int64_t step_bytes = units.step ? units.step : cache.strides[4];
  int64_t offset = unit / per_head * cache.strides[3] + unit % per_head * step_bytes;
  int64_t steps = args.steps(blockIdx.x);
  RowMove* moves = reinterpret_cast<RowMove*>(shared_memory);
  for (int64_t first = 1; first <= steps; first += kAhead) {
    __syncthreads();
    if (threadIdx.x < kAhead) {
      int64_t step = first + threadIdx.x;
      moves[threadIdx.x] = step <= steps ? find_move(args, cache, blockIdx.y, blockIdx.x, step)
                                         : RowMove{nullptr, nullptr};
    }
    __syncthreads();
    Unit held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (mine && moves[i].from) held[i] = *reinterpret_cast<const Unit*>(moves[i].from + offset);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (mine && moves[i].from) *reinterpret_cast<Unit*>(moves[i].to + offset) = held[i];
  }
}

template <typename Unit>
void launch_units(const CompactKv& args, const Units& units, Stream stream) {
  int64_t slices = (args.kv_heads * units.per_head + kThreads - 1) / kThreads;
  launch(stream, dim3(args.batch, args.layers, 2 * slices), kThreads, kAhead * sizeof(RowMove),
         compact_kv_kernel<Unit>, args, units);
}

}  // namespace

void compact_kv(const CompactKv& args, Stream stream) {
  Units units = find_units(args);
  if (units.bytes == 1) launch_units<uint8_t>(args, units, stream);
  if (units.bytes == 2) launch_units<uint16_t>(args, units, stream);
  if (units.bytes == 4) launch_units<uint32_t>(args, units, stream);
  if (units.bytes == 8) launch_units<uint2>(args, units, stream);
  if (units.bytes == 16) launch_units<uint4>(args, units, stream);
}

}  // namespace eagle2::cuda
