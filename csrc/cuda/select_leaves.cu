#include "cuda/launch.h"
#include "order.h"

namespace eagle2::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kTile = 4096;  // keys in shared memory at a time

// A thread ranks one entry of a row by counting the keys that come before its own.
__global__ void __launch_bounds__(kThreads)
    select_leaves_kernel(Matrix<const float> scores, int64_t columns, int64_t k, int32_t* index) {
  int64_t row = blockIdx.x, own = int64_t(blockIdx.y) * kThreads + threadIdx.x;
  Vector<const float> entries = scores[row];
  uint64_t key = own < columns ? order_key(entries[own], uint32_t(own)) : 0;
  int64_t rank = 0;
  for (int64_t first = 0; first < columns; first += kTile) {
    int count = int(columns - first < kTile ? columns - first : kTile);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads)
      shared_memory[i] = order_key(entries[first + i], uint32_t(first + i));
    __syncthreads();
    for (int i = 0; i < count; ++i) rank += shared_memory[i] > key;
  }
  if (own < columns && rank < k) index[row * k + rank] = int32_t(own);
}

}  // namespace

void select_leaves(Matrix<const float> scores, int64_t batch, int64_t columns, int64_t k,
                   int32_t* index, Stream stream) {
  dim3 grid(batch, (columns + kThreads - 1) / kThreads);
  launch(stream, grid, kThreads, (columns < kTile ? columns : kTile) * sizeof(uint64_t),
         select_leaves_kernel, scores, columns, k, index);
}

}  // namespace eagle2::cuda
