#include "cpu/expand.h"

#include <algorithm>
#include <functional>

#include "cpu/operators.h"
#include "cpu/parallel.h"

#define EAGLE2_KERNEL "cpu/expand_kernel.h"
#include "cpu/every_level.h"

namespace eagle2::cpu {
namespace {

struct LogSoftmax {
  float peak, log_total;

  float operator()(float x) const { return (x - peak) - log_total; }
};

struct Scratch {
  std::vector<float> logits, log_probs;
  std::vector<int64_t> ids;
  BestValues best;
};

// NaN as -inf, +inf as the largest finite float; 0 at the peak.
template <typename T>
const float* shifted_row(const T* logits, int64_t stride, int64_t size, std::vector<float>& copy) {
  copy.resize(size);
  float peak = -INFINITY;
  for (int64_t i = 0; i < size; ++i) {
    float x = widen(logits[i * stride]);
    copy[i] = x != x ? -INFINITY : std::min(x, std::numeric_limits<float>::max());
    peak = std::max(peak, copy[i]);
  }
  if (peak > -INFINITY)
    for (float& x : copy) x -= peak;
  return copy.data();
}

// `best` is of the logits. It can differ from the best log-probabilities only where rounding makes
// the k-th log-probability equal to that of a lower logit that was left out, or of a higher one
// that was chosen: the lower ids then win.
bool rounding_decides(const BestValues& best, const LogSoftmax& log_softmax) {
  if (best.count < best.k) return false;
  float last = best.values[best.k - 1], above = INFINITY;
  for (int64_t i = best.k - 1; i-- > 0 && above == INFINITY;)
    if (best.values[i] > last) above = best.values[i];
  float below = best.pushed_out[best.pushed_out[1] < last ? 1 : 0];
  below = std::max(below, best.refused);
  float worth = log_softmax(last);
  return worth == log_softmax(above) || (below > -INFINITY && worth == log_softmax(below));
}

// Leaves the k best log-probabilities in scratch.best, still in the order of the logits.
template <typename T>
void select_row(const T* logits, int64_t stride, int64_t size, int64_t k, Scratch& scratch) {
  BestValues& best = scratch.best;
  RowSum sum = {0, 0, false};
  best.reset(k);
  if (stride == 1) sum = EAGLE2_AT_LEVEL(sum_and_select<T>)(logits, size, -INFINITY, best);
  if (!sum.valid) {
    const float* row = shifted_row(logits, stride, size, scratch.logits);
    best.reset(k);
    sum = EAGLE2_AT_LEVEL(sum_and_select<float>)(row, size, 0.0f, best);
    sum.peak = 0;
  }
  LogSoftmax log_softmax = {sum.peak, sum.log_total};
  if (!rounding_decides(best, log_softmax)) {
    for (int64_t i = 0; i < best.count; ++i) best.values[i] = log_softmax(best.values[i]);
    return;
  }
  const float* row = shifted_row(logits, stride, size, scratch.logits);
  log_softmax.peak = 0;
  best.reset(k);
  for (int64_t i = 0; i < size; ++i)
    if (log_softmax(row[i]) > best.least) best.insert(log_softmax(row[i]), i);
}

// Puts scratch.best in the order rule: equal ones by id, dead ones last, by ascending id.
void order_row(int64_t k, Scratch& scratch) {
  const BestValues& best = scratch.best;
  std::vector<int64_t>& order = scratch.ids;  // first places in `best`, then ids
  order.clear();
  for (int64_t i = 0; i < best.count && best.values[i] > -INFINITY; ++i) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return best.values[a] != best.values[b] ? best.values[a] > best.values[b]
                                            : best.ids[a] < best.ids[b];
  });
  scratch.log_probs.assign(k, -INFINITY);
  for (size_t i = 0; i < order.size(); ++i) {
    scratch.log_probs[i] = best.values[order[i]];
    order[i] = best.ids[order[i]];
  }
  size_t live = order.size();
  for (int64_t id = 0; int64_t(order.size()) < k; ++id)
    if (std::find(order.begin(), order.begin() + live, id) == order.begin() + live)
      order.push_back(id);
}

template <typename T>
void expand_rows(const ExpandRows& rows, int64_t first, int64_t last, int64_t* tokens,
                 float* scores) {
  static thread_local Scratch scratch;
  for (int64_t row = first; row < last; ++row) {
    int64_t b = row / rows.leaves, leaf = row % rows.leaves;
    const T* logits = static_cast<const T*>(rows.logits);
    logits += b * rows.strides[0] + leaf * rows.strides[1];
    select_row(logits, rows.strides[2], rows.vocab, rows.k, scratch);
    order_row(rows.k, scratch);
    for (int64_t i = 0; i < rows.k; ++i) {
      int64_t id = scratch.ids[i];
      tokens[row * rows.k + i] = rows.draft_to_target.data ? rows.draft_to_target[id] : id;
      scores[row * rows.k + i] = rows.leaf_scores[b][leaf] + scratch.log_probs[i];
    }
  }
}

}  // namespace

void expand(const ExpandRows& rows, int64_t* tokens, float* scores, int num_threads) {
  for_row_ranges(rows.batch * rows.leaves, rows.vocab, num_threads,
                 [&](int64_t first, int64_t last) {
                   if (rows.dtype == Dtype::kFloat)
                     expand_rows<float>(rows, first, last, tokens, scores);
                   if (rows.dtype == Dtype::kHalf)
                     expand_rows<Half>(rows, first, last, tokens, scores);
                   if (rows.dtype == Dtype::kBfloat)
                     expand_rows<Bfloat>(rows, first, last, tokens, scores);
                 });
}

}  // namespace eagle2::cpu
