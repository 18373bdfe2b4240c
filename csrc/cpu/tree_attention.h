// What the parts of tree_attention share. A head's rows are its queries: row n * (H / G) + h is
// node n, head h of the kv head's group.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/operators.h"

namespace eagle2::cpu {

// Keys that not every row of a batch row sees: tree nodes, and slots at the edge of the window.
struct MaskedKeys {
  std::vector<int64_t> slots;
  std::vector<uint32_t> seen;  // [slots, padded rows], all bits or none
  std::vector<bool> live;      // [N]: false = padding, which gives 0
  int64_t first, last;         // the run of prefix slots that every row sees
};

// The softmax of some keys before its division: merged by peak and total.
struct Partial {
  float* mixed;  // [rows, E]
  float* peak;   // [rows]
  float* total;  // [rows]
};

// One kv head of one batch row against one run of prefix slots.
struct AttentionUnit {
  const Attention* args;
  const MaskedKeys* keys;
  int64_t batch_row, head, first, last;
  bool with_masked;
  Partial out;

  int64_t group() const { return args->heads / args->kv_heads; }
  int64_t rows() const { return args->nodes * group(); }
};

inline int64_t padded_rows(int64_t rows) { return (rows + 15) / 16 * 16; }

}  // namespace eagle2::cpu
