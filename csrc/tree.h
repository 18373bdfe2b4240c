// Host and device: ancestor words, a candidate's effective score, the accept walk.
#pragma once
#include <cmath>
#include <cstdint>

#include "view.h"

namespace eagle2 {

EAGLE2_HD int64_t num_words(int64_t num_nodes) { return (num_nodes + 63) / 64; }

EAGLE2_HD void mark_ancestor(uint64_t* words, int64_t node) {
  words[node / 64] |= uint64_t(1) << (node % 64);
}

EAGLE2_HD bool is_misplaced(float score, int32_t parent, int64_t index) {
  return score != score || parent < -1 || parent >= index;
}

// Never above the parent's, so the best candidates are connected whatever scores come in. Reads
// only `effective` of the parent, whose index is lower.
EAGLE2_HD float effective_score(float score, int32_t parent, int64_t index,
                                const float* effective) {
  if (is_misplaced(score, parent, index)) return -INFINITY;
  score += 0.0f;  // -0.0 becomes 0.0
  if (parent < 0) return score;
  return effective[parent] < score ? effective[parent] : score;
}

// The same from the whole path, for threads that take candidates in any order.
EAGLE2_HD float effective_score(Vector<const float> scores, Vector<const int32_t> parents,
                                int64_t index) {
  float least = INFINITY;
  for (int32_t parent; index >= 0; index = parent) {
    float score = scores[index];
    parent = parents[index];
    if (is_misplaced(score, parent, index)) return -INFINITY;
    score += 0.0f;
    least = score < least ? score : least;
  }
  return least;
}

struct Walk {
  int32_t accept_length;
  int64_t bonus_token;  // -1 in a row without a tree
};

// Writes all depth + 1 columns of path. target_token(node) is asked once for each node on the path.
// A child's number is above its parent's, so one ascending pass finds every step; it ends whatever
// parents hold.
template <typename TargetToken>
EAGLE2_HD Walk accept_walk(Vector<const int64_t> tokens, Vector<const int32_t> parents,
                           int64_t num_nodes, int64_t depth, int32_t* path,
                           const TargetToken& target_token) {
  for (int64_t step = 0; step <= depth; ++step) path[step] = -1;
  if (num_nodes <= 0) return {0, -1};
  Walk walk = {0, target_token(0)};
  int32_t last = path[0] = 0;
  for (int32_t node = 1; node < num_nodes && walk.accept_length < depth; ++node) {
    if (parents[node] != last || tokens[node] != walk.bonus_token) continue;
    last = path[++walk.accept_length] = node;
    walk.bonus_token = target_token(node);
  }
  return walk;
}

}  // namespace eagle2
