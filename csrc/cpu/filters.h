// top-k and top-p on a row of x = (logit - peak) / temperature, without sorting it: buckets by the
// upper bits of the score narrow the row down, partitions within one bucket do the rest.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "order.h"

namespace eagle2::cpu {

constexpr uint32_t kBuckets = 4096;

inline uint32_t bucket_of(float x) { return order_bits(x) >> 20; }

struct FilterScratch {
  std::vector<int64_t> counts;
  std::vector<double> masses;
  std::vector<uint64_t> keys;
};

// What a filter keeps: scores above `least`, and those at it up to an index.
struct Kept {
  float least = -INFINITY;
  int32_t last_index = INT32_MAX;
};

inline void keys_of_bucket(const float* x, int64_t size, uint32_t bucket, FilterScratch& scratch) {
  scratch.keys.clear();
  for (int64_t i = 0; i < size; ++i)
    if (bucket_of(x[i]) == bucket) scratch.keys.push_back(order_key(x[i], uint32_t(i)));
}

// The k largest and what ties with the last of them; 1 <= k <= size.
inline Kept keep_top_k(const float* x, int64_t size, int64_t k, FilterScratch& scratch) {
  scratch.counts.assign(kBuckets, 0);
  for (int64_t i = 0; i < size; ++i) ++scratch.counts[bucket_of(x[i])];
  uint32_t bucket = kBuckets - 1;
  for (; scratch.counts[bucket] < k; --bucket) k -= scratch.counts[bucket];
  keys_of_bucket(x, size, bucket, scratch);
  auto last = scratch.keys.begin() + (k - 1);
  std::nth_element(scratch.keys.begin(), last, scratch.keys.end(), std::greater<>());
  return {x[index_of(*last)], INT32_MAX};
}

// The shortest head of the order whose mass is at least `share` of the whole, but one id always.
// mass = exp(x).
inline Kept keep_top_p(const float* x, const float* mass, int64_t size, double share,
                       FilterScratch& scratch) {
  scratch.masses.assign(kBuckets, 0.0);
  double total = 0, before = 0;
  for (int64_t i = 0; i < size; ++i)
    if (mass[i] > 0) scratch.masses[bucket_of(x[i])] += mass[i];
  for (double bucket_mass : scratch.masses) total += bucket_mass;
  uint32_t bucket = kBuckets - 1;
  for (; bucket > 0; before += scratch.masses[bucket--])
    if (scratch.masses[bucket] > 0 && before + scratch.masses[bucket] >= share * total) break;
  if (bucket == 0) return {};
  keys_of_bucket(x, size, bucket, scratch);
  auto first = scratch.keys.begin(), end = scratch.keys.end();
  while (end - first > 1) {  // ends at the first key with which the head is heavy enough
    auto middle = first + (end - first) / 2;
    std::nth_element(first, middle, end, std::greater<>());
    double upper = 0;
    for (auto key = first; key < middle; ++key) upper += mass[index_of(*key)];
    if (before + upper >= share * total) {
      end = middle;
    } else {
      before += upper;
      first = middle;
    }
  }
  return {x[index_of(*first)], int32_t(index_of(*first))};
}

}  // namespace eagle2::cpu
