// Host and device: what the operators of trees take. Letters as in DESIGN: B batch, C candidates,
// N nodes, W words. Outputs are contiguous.
#pragma once
#include <cstdint>

#include "view.h"

namespace eagle2 {

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

struct VerifyRows {
  Matrix<const int64_t> tokens;         // [B, N]
  Matrix<const int32_t> parents;        // [B, N]
  Vector<const int32_t> num_nodes;      // [B]
  Matrix<const int64_t> target_tokens;  // [B, N]
  int64_t batch, columns;
};

}  // namespace eagle2
