#include "cuda/launch.h"
#include "tree.h"

namespace eagle2::cuda {
namespace {

constexpr int kThreads = 64;
constexpr int64_t kNodeBytes = 2 * sizeof(int64_t) + sizeof(int32_t);

// All threads bring the row's tree close, then one walks.
__global__ void __launch_bounds__(kThreads)
    verify_kernel(VerifyRows rows, int64_t depth, int32_t* path, int32_t* accept_length,
                  int64_t* bonus_token, bool fits) {
  int64_t row = blockIdx.x;
  int64_t count = rows.num_nodes[row] < rows.columns ? rows.num_nodes[row] : rows.columns;
  Vector<const int64_t> tokens = rows.tokens[row], target_tokens = rows.target_tokens[row];
  Vector<const int32_t> parents = rows.parents[row];
  if (fits) {
    int64_t* near_tokens = reinterpret_cast<int64_t*>(shared_memory);
    int64_t* near_targets = near_tokens + rows.columns;
    int32_t* near_parents = reinterpret_cast<int32_t*>(near_targets + rows.columns);
    for (int64_t node = threadIdx.x; node < count; node += kThreads) {
      near_tokens[node] = tokens[node];
      near_targets[node] = target_tokens[node];
      near_parents[node] = parents[node];
    }
    __syncthreads();
    tokens = {near_tokens, 1}, target_tokens = {near_targets, 1}, parents = {near_parents, 1};
  }
  if (threadIdx.x > 0) return;
  Walk walk = accept_walk(tokens, parents, count, depth, path + row * (depth + 1), target_tokens);
  accept_length[row] = walk.accept_length;
  bonus_token[row] = walk.bonus_token;
}

}  // namespace

void verify(const VerifyRows& rows, int64_t depth, int32_t* path, int32_t* accept_length,
            int64_t* bonus_token, Stream stream) {
  int64_t bytes = rows.columns * kNodeBytes;
  bool fits = bytes <= kSharedBytes;
  launch(stream, dim3(rows.batch), kThreads, fits ? bytes : 0, verify_kernel, rows, depth, path,
         accept_length, bonus_token, fits);
}

}  // namespace eagle2::cuda
