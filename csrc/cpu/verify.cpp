#include <algorithm>

#include "cpu/operators.h"
#include "cpu/parallel.h"
#include "tree.h"

namespace eagle2::cpu {

void verify(const VerifyRows& rows, int64_t depth, int32_t* path, int32_t* accept_length,
            int64_t* bonus_token, int num_threads) {
  for_row_ranges(rows.batch, rows.columns + depth, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      int64_t count = std::min<int64_t>(rows.num_nodes[row], rows.columns);
      Walk walk = accept_walk(rows.tokens[row], rows.parents[row], count, depth,
                              path + row * (depth + 1), rows.target_tokens[row]);
      accept_length[row] = walk.accept_length;
      bonus_token[row] = walk.bonus_token;
    }
  });
}

}  // namespace eagle2::cpu
