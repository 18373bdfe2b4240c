#include "cuda/launch.h"
#include "order.h"
#include "tree.h"

namespace eagle2::cuda {
namespace {

constexpr int kMaxThreads = 512;

// What the threads of a block know of a row's candidates.
struct Kept {
  float* effective;  // [C]
  uint32_t* bits;    // [ceil(C / 32)] which candidates are kept
  int32_t* before;   // [ceil(C / 32) + 1] how many are in lower words; the last entry: in all
  int32_t columns, words;

  __device__ Kept(void* memory, int32_t columns)
      : effective(static_cast<float*>(memory)),
        bits(static_cast<uint32_t*>(memory) + columns),
        columns(columns),
        words((columns + 31) / 32) {
    before = reinterpret_cast<int32_t*>(bits + words);
  }

  __device__ bool has(int32_t i) const { return bits[i / 32] >> (i % 32) & 1; }

  // The node number of a kept candidate; the root is candidate -1.
  __device__ int32_t node(int32_t i) const {
    if (i < 0) return 0;
    return 1 + before[i / 32] + __popc(bits[i / 32] & ((1u << (i % 32)) - 1));
  }
};

// How many live candidates have this key or come before it; the same in all threads.
__device__ int32_t count_from(const Kept& kept, uint64_t least) {
  int32_t count = 0;
  for (int32_t first = 0; first < kept.columns; first += blockDim.x) {
    int32_t i = first + threadIdx.x;
    count +=
        __syncthreads_count(i < kept.columns && order_key(kept.effective[i], uint32_t(i)) >= least);
  }
  return count;
}

// The least key that is kept: the `wanted` best live candidates have keys at or above it. Found bit
// by bit; no two keys are equal, so some threshold has exactly `wanted`.
__device__ uint64_t threshold(const Kept& kept, int32_t wanted) {
  uint64_t least = uint64_t(kOrderDead + 1) << 32;
  if (count_from(kept, least) <= wanted) return least;
  if (wanted <= 0) return UINT64_MAX;
  least = 0;
  for (int bit = 63; bit >= 0; --bit) {
    uint64_t longer = least | uint64_t(1) << bit;
    bool in_every_key = bit < 32 && kept.columns <= int64_t(1) << bit;
    int32_t count = in_every_key ? wanted + 1 : count_from(kept, longer);
    if (count >= wanted) least = longer;
    if (count == wanted) break;
  }
  return least;
}

__device__ void mark(const Kept& kept, uint64_t least) {
  for (int32_t first = 0; first < kept.columns; first += blockDim.x) {
    int32_t i = first + threadIdx.x;
    bool here = i < kept.columns && order_key(kept.effective[i], uint32_t(i)) >= least;
    uint32_t bits = __ballot_sync(0xffffffff, here);
    if (i < kept.columns && i % 32 == 0) kept.bits[i / 32] = bits;
  }
  __syncthreads();
  for (int32_t word = threadIdx.x; word <= kept.words; word += blockDim.x) {
    int32_t before = 0;
    for (int32_t lower = 0; lower < word; ++lower) before += __popc(kept.bits[lower]);
    kept.before[word] = before;
  }
  __syncthreads();
}

// One row of a tree.
struct Row {
  const TreeRows& tree;
  int64_t first;  // node of the batch
  int32_t words;  // of ancestors, per node

  __device__ void put(int32_t node, int64_t token, int32_t parent, int32_t depth, float score) {
    tree.tokens[first + node] = token;
    tree.parents[first + node] = parent;
    tree.depths[first + node] = depth;
    tree.scores[first + node] = score;
  }

  __device__ uint64_t* ancestors(int32_t node) { return tree.ancestors + (first + node) * words; }
};

// Up the path, so node numbers fall: each word is written once, when the path has left it.
__device__ int32_t put_ancestors(uint64_t* words, int32_t count, const Kept& kept,
                                 Vector<const int32_t> parents, int32_t candidate) {
  int32_t word = count - 1;
  uint64_t bits = 0;
  for (int32_t depth = 0;; ++depth) {
    int32_t node = kept.node(candidate);
    for (; word > node / 64; --word, bits = 0) words[word] = bits;
    mark_ancestor(&bits, node % 64);
    if (candidate < 0) {
      words[0] = bits;
      return depth;
    }
    candidate = parents[candidate];
  }
}

__global__ void __launch_bounds__(kMaxThreads)
    rerank_kernel(CandidateRows candidates, Vector<const int64_t> root_tokens,
                  Vector<const int32_t> num_nodes, int64_t max_nodes, TreeRows tree,
                  int32_t* scratch, int64_t scratch_row) {
  int64_t row = blockIdx.x;
  int32_t columns = int32_t(candidates.columns);
  Vector<const int64_t> tokens = candidates.tokens[row];
  Vector<const int32_t> parents = candidates.parents[row];
  Kept kept(scratch_row ? static_cast<void*>(scratch + row * scratch_row) : shared_memory, columns);
  for (int32_t i = threadIdx.x; i < columns; i += blockDim.x)
    kept.effective[i] = effective_score(candidates.scores[row], parents, i);

  int32_t wanted = num_nodes[row] < max_nodes ? num_nodes[row] : int32_t(max_nodes);
  mark(kept, threshold(kept, wanted - 1));
  int32_t count = wanted > 0 ? 1 + kept.before[kept.words] : 0;
  if (threadIdx.x == 0) tree.num_nodes[row] = count;

  Row out = {tree, row * max_nodes, int32_t(num_words(max_nodes))};
  for (int32_t i = int32_t(threadIdx.x) - 1; i < columns && count; i += blockDim.x) {
    if (i >= 0 && !kept.has(i)) continue;
    int32_t node = kept.node(i);
    int32_t depth = put_ancestors(out.ancestors(node), out.words, kept, parents, i);
    if (i < 0)
      out.put(0, root_tokens[row], -1, 0, 0.0f);
    else
      out.put(node, tokens[i], kept.node(parents[i]), depth, kept.effective[i]);
  }
  for (int32_t node = count + threadIdx.x; node < max_nodes; node += blockDim.x) {
    out.put(node, -1, -1, 0, -INFINITY);
    for (int32_t word = 0; word < out.words; ++word) out.ancestors(node)[word] = 0;
  }
}

int64_t kept_size(int64_t columns) { return columns + 2 * ((columns + 31) / 32) + 1; }

}  // namespace

int64_t rerank_scratch(int64_t columns) {
  int64_t size = kept_size(columns);
  return size * int64_t(sizeof(int32_t)) <= kSharedBytes ? 0 : size;
}

void rerank(const CandidateRows& candidates, Vector<const int64_t> root_tokens,
            Vector<const int32_t> num_nodes, int64_t max_nodes, const TreeRows& tree,
            int32_t* scratch, Stream stream) {
  int64_t warps = (candidates.columns + 32) / 32, scratch_row = rerank_scratch(candidates.columns);
  int threads = warps * 32 < kMaxThreads ? int(warps) * 32 : kMaxThreads;
  int64_t shared = scratch_row ? 0 : kept_size(candidates.columns) * int64_t(sizeof(int32_t));
  launch(stream, dim3(candidates.batch), threads, shared, rerank_kernel, candidates, root_tokens,
         num_nodes, max_nodes, tree, scratch, scratch_row);
}

}  // namespace eagle2::cuda
