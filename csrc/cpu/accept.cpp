#include <algorithm>

#include "cpu/operators.h"
#include "cpu/parallel.h"
#include "cpu/sample.h"
#include "tree.h"

namespace eagle2::cpu {

void accept(const VerifyRows& tree, const SampleRows& rows, int64_t depth, int32_t* path,
            int32_t* accept_length, int64_t* bonus_token, int64_t* path_tokens, int num_threads) {
  int64_t work = rows.vocab * kAccessesPerLogit;
  for_row_ranges(tree.batch, work, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      int64_t count = std::min<int64_t>(tree.num_nodes[row], tree.columns);
      int64_t* tokens = path_tokens + row * (depth + 1);
      std::fill_n(tokens, depth + 1, -1);
      auto draw_next = [&](int64_t node) {
        return *tokens++ = draw(rows, row, node, sample_scratch());
      };
      Walk walk = accept_walk(tree.tokens[row], tree.parents[row], count, depth,
                              path + row * (depth + 1), draw_next);
      accept_length[row] = walk.accept_length;
      bonus_token[row] = walk.bonus_token;
    }
  });
}

}  // namespace eagle2::cpu
