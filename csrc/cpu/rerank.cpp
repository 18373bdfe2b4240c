#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "cpu/operators.h"
#include "cpu/parallel.h"
#include "order.h"
#include "tree.h"

namespace eagle2::cpu {
namespace {

struct Scratch {
  std::vector<float> effective;
  std::vector<uint64_t> keys;     // by candidate
  std::vector<uint64_t> ordered;  // live keys, for the selection
  std::vector<int32_t> node;      // by candidate, its node number

  explicit Scratch(int64_t columns)
      : effective(columns), keys(columns), ordered(columns), node(columns) {}
};

// The least key that is kept: the `wanted` best live candidates have keys at or above it.
uint64_t threshold(const CandidateRows& candidates, int64_t row, int64_t wanted, Scratch& scratch) {
  Vector<const float> scores = candidates.scores[row];
  Vector<const int32_t> parents = candidates.parents[row];
  int64_t live = 0;
  for (int64_t i = 0; i < candidates.columns; ++i) {
    scratch.effective[i] = effective_score(scores[i], parents[i], i, scratch.effective.data());
    scratch.keys[i] = order_key(scratch.effective[i], uint32_t(i));
    scratch.ordered[live] = scratch.keys[i];
    live += !is_dead(scratch.keys[i]);
  }
  if (live <= wanted) return uint64_t(kOrderDead + 1) << 32;
  if (wanted == 0) return UINT64_MAX;
  auto first = scratch.ordered.begin(), kept = first + wanted - 1;
  std::nth_element(first, kept, first + live, std::greater<>());
  return *kept;
}

// Row `row` of the tree, whose columns are contiguous.
class RowWriter {
 public:
  RowWriter(const TreeRows& tree, int64_t row, int64_t max_nodes)
      : words_(num_words(max_nodes)),
        tokens_(tree.tokens + row * max_nodes),
        parents_(tree.parents + row * max_nodes),
        depths_(tree.depths + row * max_nodes),
        ancestors_(tree.ancestors + row * max_nodes * words_),
        scores_(tree.scores + row * max_nodes) {}

  void root(int64_t token) {
    put(0, token, -1, 0, 0.0f);
    std::fill_n(ancestors_, words_, uint64_t(0));
    mark_ancestor(ancestors_, 0);
  }

  void child(int64_t node, int64_t token, int32_t parent, float score) {
    put(node, token, parent, depths_[parent] + 1, score);
    uint64_t* words = ancestors_ + node * words_;
    std::copy_n(ancestors_ + parent * words_, words_, words);
    mark_ancestor(words, node);
  }

  void padding(int64_t node) {
    put(node, -1, -1, 0, -INFINITY);
    std::fill_n(ancestors_ + node * words_, words_, uint64_t(0));
  }

 private:
  void put(int64_t node, int64_t token, int32_t parent, int32_t depth, float score) {
    tokens_[node] = token;
    parents_[node] = parent;
    depths_[node] = depth;
    scores_[node] = score;
  }

  int64_t words_;
  int64_t* tokens_;
  int32_t *parents_, *depths_;
  uint64_t* ancestors_;
  float* scores_;
};

int64_t lay_out(const CandidateRows& candidates, int64_t row, uint64_t least, int64_t root_token,
                Scratch& scratch, RowWriter& out) {
  Vector<const int64_t> tokens = candidates.tokens[row];
  Vector<const int32_t> parents = candidates.parents[row];
  int64_t count = 1;
  out.root(root_token);
  for (int64_t i = 0; i < candidates.columns; ++i) {
    if (scratch.keys[i] < least) continue;
    int32_t parent = parents[i] < 0 ? 0 : scratch.node[parents[i]];
    scratch.node[i] = int32_t(count);
    out.child(count++, tokens[i], parent, scratch.effective[i]);
  }
  return count;
}

}  // namespace

void rerank(const CandidateRows& candidates, Vector<const int64_t> root_tokens,
            Vector<const int32_t> num_nodes, int64_t max_nodes, const TreeRows& tree,
            int num_threads) {
  int64_t row_elements = candidates.columns + max_nodes;
  for_row_ranges(candidates.batch, row_elements, num_threads, [&](int64_t first, int64_t last) {
    Scratch scratch(candidates.columns);
    for (int64_t row = first; row < last; ++row) {
      RowWriter out(tree, row, max_nodes);
      int64_t wanted = std::clamp<int64_t>(num_nodes[row], 0, max_nodes), count = 0;
      if (wanted > 0) {
        uint64_t least = threshold(candidates, row, wanted - 1, scratch);
        count = lay_out(candidates, row, least, root_tokens[row], scratch, out);
      }
      tree.num_nodes[row] = int32_t(count);
      for (int64_t node = count; node < max_nodes; ++node) out.padding(node);
    }
  });
}

}  // namespace eagle2::cpu
