#include <algorithm>
#include <functional>
#include <vector>

#include "cpu/operators.h"
#include "cpu/parallel.h"
#include "order.h"
#include "tree.h"

namespace eagle2::cpu {
namespace {

void enter_row(const LevelRows& level, int64_t row, std::vector<uint64_t>& keys) {
  int64_t size = level.leaves * level.children, begin = level.begin;
  keys.resize(size);
  for (int64_t i = 0; i < size; ++i) {
    int64_t leaf = i / level.children, child = i % level.children;
    float score = level.scores[row][leaf][child];
    level.all_tokens[row][begin + i] = level.tokens[row][leaf][child];
    level.all_scores[row][begin + i] = score;
    level.all_parents[row][begin + i] = level.parents[row][leaf];
    keys[i] = order_key(score, uint32_t(begin + i));
  }
  std::partial_sort(keys.begin(), keys.begin() + level.k, keys.end(), std::greater<>());
}

// Of the level itself, leaf r has r candidates ahead of it.
int64_t earlier_ahead(const LevelRows& level, int64_t row, uint64_t key) {
  int64_t ahead = 0;
  for (int64_t i = 0; i < level.begin; ++i)
    ahead += order_key(level.all_scores[row][i], uint32_t(i)) > key;
  return ahead;
}

}  // namespace

void enter_level(const LevelRows& level, const LeafRows& leaves, int num_threads) {
  int64_t k = level.k;
  int64_t width = level.begin + level.leaves * level.children;
  for_row_ranges(level.batch, width, num_threads, [&](int64_t first, int64_t last) {
    std::vector<uint64_t> keys;
    for (int64_t row = first; row < last; ++row) {
      enter_row(level, row, keys);
      int64_t live = 0;
      bool all_live = true;
      for (int64_t r = 0; r < k; ++r) {
        int64_t candidate = index_of(keys[r]), place = candidate - level.begin;
        int64_t leaf = place / level.children, at = row * k + r;
        leaves.tokens[at] = level.tokens[row][leaf][place % level.children];
        leaves.scores[at] = level.scores[row][leaf][place % level.children];
        leaves.parents[at] = int32_t(candidate);
        leaves.ranks[at] = leaf;
        uint64_t* words = leaves.words + at * level.words_per_row;
        for (int64_t w = 0; w < level.words_per_row; ++w) words[w] = level.words[row][leaf][w];
        mark_ancestor(words, level.first_slot + r);
        // ranks rise from leaf to leaf: the first that is out ends it
        all_live = all_live && !is_dead(keys[r]) &&
                   r + earlier_ahead(level, row, keys[r]) < level.num_nodes[row] - 1;
        live += all_live;
      }
      leaves.live[row] = int32_t(live);
    }
  });
}

}  // namespace eagle2::cpu
