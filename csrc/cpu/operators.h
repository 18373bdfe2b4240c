// The C++ form. Letters as in DESIGN: B batch, C candidates, N nodes, W words, D depth. Outputs are
// contiguous; what each operator means is in eagle2_kernels/ops.py.
#pragma once
#include <cstdint>

#include "cache.h"
#include "rows.h"
#include "view.h"

namespace eagle2::cpu {

void select_leaves(Matrix<const float> scores, int64_t batch, int64_t columns, int64_t k,
                   int32_t* index, int num_threads);

// One level: the children of L leaves, and the buffers of candidates that it is entered in.
struct LevelRows {
  Matrix<int64_t> all_tokens;   // [B, C]
  Matrix<float> all_scores;     // [B, C]
  Matrix<int32_t> all_parents;  // [B, C]
  int64_t begin;
  Cube<const int64_t> tokens;     // [B, L, K]
  Cube<const float> scores;       // [B, L, K]
  Matrix<const int32_t> parents;  // [B, L]
  Cube<const uint64_t> words;     // [B, L, W]
  Vector<const int32_t> num_nodes;
  int64_t batch, leaves, children, words_per_row, first_slot, k;
};

// The leaves of the next draft step, [B, k]; words [B, k, W], live [B].
struct LeafRows {
  int64_t* tokens;
  float* scores;
  int32_t* parents;
  int64_t* ranks;
  uint64_t* words;
  int32_t* live;
};

void enter_level(const LevelRows& level, const LeafRows& leaves, int num_threads);

void rerank(const CandidateRows& candidates, Vector<const int64_t> root_tokens,
            Vector<const int32_t> num_nodes, int64_t max_nodes, const TreeRows& tree,
            int num_threads);

void verify(const VerifyRows& rows, int64_t depth, int32_t* path, int32_t* accept_length,
            int64_t* bonus_token, int num_threads);

enum class Dtype { kFloat, kHalf, kBfloat };

struct ExpandRows {
  const void* logits;  // [B, L, V]
  Dtype dtype;
  int64_t strides[3];
  int64_t batch, leaves, vocab, k;
  Matrix<const float> leaf_scores;        // [B, L]
  Vector<const int64_t> draft_to_target;  // [V] or null
};

void expand(const ExpandRows& rows, int64_t* tokens, float* scores, int num_threads);

struct Attention {
  const void *q, *k, *v;  // [B, N, H, E]; caches [B, S, G, E] or [blocks, block rows, G, E]
  void* out;              // [B, N, H, E]
  Dtype dtype;
  int64_t q_strides[4], k_strides[4], v_strides[4];
  int64_t batch, nodes, heads, dim, kv_heads, words, blocks, block_rows;
  const int32_t *prefix_len, *num_nodes;  // [B]
  const uint64_t* ancestors;              // [B, N, W]
  const int32_t* block_table;             // [B, table columns] or null
  int64_t table_columns, window;          // no window: the largest integer
  float scale;

  int64_t capacity() const { return block_table ? table_columns * block_rows : block_rows; }
};

void tree_attention(const Attention& attention, int num_threads);

struct SampleRows {
  const void* logits;  // [B, N, V]
  Dtype dtype;
  int64_t strides[3];
  int64_t batch, columns, vocab;
  Vector<const float> temperature;   // [B]
  Vector<const int32_t> top_k;       // [B]
  Vector<const float> top_p, min_p;  // [B]
  Vector<const int64_t> seed;        // [B]
  Matrix<const int64_t> positions;   // [B, N]
};

void sample(const SampleRows& rows, int64_t* tokens, int num_threads);

// tree.target_tokens is not looked at.
void accept(const VerifyRows& tree, const SampleRows& rows, int64_t depth, int32_t* path,
            int32_t* accept_length, int64_t* bonus_token, int64_t* path_tokens, int num_threads);

void compact_kv(const CompactKv& args, int num_threads);

}  // namespace eagle2::cpu
