#include "cpu/sample.h"

#include <cfloat>

#include "cpu/parallel.h"

#define EAGLE2_KERNEL "cpu/sample_kernel.h"
#include "cpu/every_level.h"

namespace eagle2::cpu {
namespace {

constexpr int64_t kGroup = portable::kGroup;

template <typename T>
const T* contiguous_row(const SampleRows& rows, int64_t row, int64_t node, SampleScratch& scratch) {
  const T* logits = static_cast<const T*>(rows.logits);
  logits += row * rows.strides[0] + node * rows.strides[1];
  if (rows.strides[2] == 1) return logits;
  scratch.logits.resize(rows.vocab * sizeof(T));
  T* copy = reinterpret_cast<T*>(scratch.logits.data());
  for (int64_t i = 0; i < rows.vocab; ++i) copy[i] = logits[i * rows.strides[2]];
  return copy;
}

void filter(const SampleRows& rows, int64_t row, SampleScratch& scratch) {
  auto drop_rest = EAGLE2_AT_LEVEL(drop_rest);
  float* x = scratch.x.data();
  int64_t size = int64_t(scratch.x.size()), top_k = rows.top_k[row];
  float top_p = rows.top_p[row], min_p = rows.min_p[row];
  if (top_k > 0 && top_k < rows.vocab)
    drop_rest(x, size, keep_top_k(x, size, top_k, scratch.filter));
  if (top_p < 1) {
    scratch.mass.resize(size);
    EAGLE2_AT_LEVEL(exp_row)(x, size, scratch.mass.data());
    drop_rest(x, size, keep_top_p(x, scratch.mass.data(), size, top_p, scratch.filter));
  }
  if (min_p > 0) drop_rest(x, size, {std::min(0.0f, std::log(min_p))});
}

template <typename T>
int64_t draw_row(const SampleRows& rows, int64_t row, int64_t node, SampleScratch& scratch) {
  const T* logits = contiguous_row<T>(rows, row, node, scratch);
  float temperature = rows.temperature[row];
  float peak = EAGLE2_AT_LEVEL(peak_of<T>)(logits, rows.vocab);
  if (peak == -INFINITY) return -1;
  if (!(temperature > 0)) return EAGLE2_AT_LEVEL(first_at<T>)(logits, rows.vocab, peak);
  scratch.x.resize((rows.vocab + kGroup - 1) / kGroup * kGroup);
  EAGLE2_AT_LEVEL(shift_row<T>)(logits, rows.vocab, peak, temperature, scratch.x.data());
  filter(rows, row, scratch);
  return EAGLE2_AT_LEVEL(gumbel_argmax)(scratch.x.data(), int64_t(scratch.x.size()),
                                        uint64_t(rows.seed[row]),
                                        uint64_t(rows.positions[row][node]));
}

}  // namespace

int64_t draw(const SampleRows& rows, int64_t row, int64_t node, SampleScratch& scratch) {
  if (rows.dtype == Dtype::kFloat) return draw_row<float>(rows, row, node, scratch);
  if (rows.dtype == Dtype::kHalf) return draw_row<Half>(rows, row, node, scratch);
  return draw_row<Bfloat>(rows, row, node, scratch);
}

SampleScratch& sample_scratch() {
  static thread_local SampleScratch scratch;
  return scratch;
}

void sample(const SampleRows& rows, int64_t* tokens, int num_threads) {
  int64_t count = rows.batch * rows.columns, work = rows.vocab * kAccessesPerLogit;
  for_row_ranges(count, work, num_threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      tokens[i] = draw(rows, i / rows.columns, i % rows.columns, sample_scratch());
  });
}

}  // namespace eagle2::cpu
