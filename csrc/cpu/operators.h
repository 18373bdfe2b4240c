// The C++ form. Letters as in DESIGN: B batch, C candidates, N nodes, W words, D depth. Outputs are
// contiguous; what each operator means is in eagle2_kernels/ops.py.
#pragma once
#include <cstdint>

#include "view.h"

namespace eagle2::cpu {

void select_leaves(Matrix<const float> scores, int64_t batch, int64_t columns, int64_t k,
                   int32_t* index, int num_threads);

struct CandidateRows {
  Matrix<const int64_t> tokens;   // [B, C]
  Matrix<const float> scores;     // [B, C]
  Matrix<const int32_t> parents;  // [B, C]
  int64_t batch, columns;
};

struct TreeRows {
  int64_t* tokens;      // [B, N]
  int32_t* parents;     // [B, N]
  int32_t* depths;      // [B, N]
  uint64_t* ancestors;  // [B, N, W]
  float* scores;        // [B, N]
  int32_t* num_nodes;   // [B]
};

void rerank(const CandidateRows& candidates, Vector<const int64_t> root_tokens,
            Vector<const int32_t> num_nodes, int64_t max_nodes, const TreeRows& tree,
            int num_threads);

struct VerifyRows {
  Matrix<const int64_t> tokens;         // [B, N]
  Matrix<const int32_t> parents;        // [B, N]
  Vector<const int32_t> num_nodes;      // [B]
  Matrix<const int64_t> target_tokens;  // [B, N]
  int64_t batch, columns;
};

void verify(const VerifyRows& rows, int64_t depth, int32_t* path, int32_t* accept_length,
            int64_t* bonus_token, int num_threads);

}  // namespace eagle2::cpu
