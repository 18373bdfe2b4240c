#include <algorithm>
#include <functional>
#include <vector>

#include "cpu/operators.h"
#include "cpu/parallel.h"
#include "order.h"

namespace eagle2::cpu {

void select_leaves(Matrix<const float> scores, int64_t batch, int64_t columns, int64_t k,
                   int32_t* index, int num_threads) {
  for_row_ranges(batch, columns, num_threads, [=](int64_t first, int64_t last) {
    std::vector<uint64_t> keys(columns);
    for (int64_t row = first; row < last; ++row) {
      for (int64_t i = 0; i < columns; ++i) keys[i] = order_key(scores[row][i], uint32_t(i));
      std::partial_sort(keys.begin(), keys.begin() + k, keys.end(), std::greater<>());
      for (int64_t i = 0; i < k; ++i) index[row * k + i] = int32_t(index_of(keys[i]));
    }
  });
}

}  // namespace eagle2::cpu
