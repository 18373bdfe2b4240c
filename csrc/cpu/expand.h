// What the parts of expand share.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

namespace eagle2::cpu {

// The k largest values of a row that is read in ascending order of ids, in the order rule: larger
// value first, then lower id.
struct BestValues {
  std::vector<float> values;
  std::vector<int64_t> ids;
  int64_t k = 0, count = 0;
  float least;          // what a value has to exceed to get in: equal ones come too late
  float pushed_out[2];  // the last two distinct values that were in, ascending
  float refused;        // no value that was refused before there were k is above it

  void reset(int64_t size) {
    k = size, count = 0, least = refused = -INFINITY;
    pushed_out[0] = pushed_out[1] = -INFINITY;
    values.resize(size), ids.resize(size);
  }

  void insert(float value, int64_t id) {
    int64_t place = count;
    if (count == k) {
      if (values[k - 1] != pushed_out[1]) pushed_out[0] = pushed_out[1];
      pushed_out[1] = values[--place];
    } else {
      ++count;
    }
    for (; place > 0 && values[place - 1] < value; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = id;
    if (count == k) least = values[k - 1];
  }
};

struct RowSum {
  float peak, log_total;  // of exp(x - peak)
  bool valid;             // false: +inf or a very large peak, the row has to be brought down first
};

}  // namespace eagle2::cpu
