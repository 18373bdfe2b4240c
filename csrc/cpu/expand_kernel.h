// No include guard: see every_level.h. Each logit is read once from memory; what exceeds the k-th
// best so far is rare, so one branch per step covers the selection and the running peak alike.

constexpr int kStep = 4;                       // vectors
constexpr uint32_t kAll = (1u << kLanes) - 1;  // every lane

// The exponent of 2 with which x counts in the sum. Fused, the product is exact, and the rounding
// of `origin` is one factor of the whole sum, known in the end.
// Bounded, NaN counts as -inf; else both make the sum NaN.
template <bool Bounded>
EAGLE2_INLINE F exponent_of(F x, F origin) {
  F y = kFused ? fma(x, set1(kLog2e), origin) : (x + origin) * set1(kLog2e);
  return Bounded ? max(y, set1(kLeastExponent)) : y;
}

EAGLE2_INLINE float origin_of(float peak) { return kFused ? peak * -kLog2e : -peak; }

inline double log_of_origin(float peak) {
  return kFused ? -(double(origin_of(peak)) + double(peak) * kLog2e) * M_LN2 : 0.0;
}

// Hands over what exceeds the k-th best so far; false: there is a +inf.
inline bool select(const F* x, int64_t first_id, BestValues& best) {
  float values[kStep * kLanes];
  uint64_t hits = 0;
  for (int i = 0; i < kStep; ++i) {
    store(values + i * kLanes, x[i]);
    hits |= uint64_t(greater(x[i], set1(best.least))) << (i * kLanes);
  }
  for (; hits; hits &= hits - 1) {
    int i = __builtin_ctzll(hits);
    if (values[i] == INFINITY) return false;
    if (values[i] > best.least) best.insert(values[i], first_id + i);
  }
  return true;
}

struct RunningSum {
  F sum, origin, bar;
  float peak;
  double earlier;  // what `sum` has been emptied into, so that long rows do not gather rounding

  EAGLE2_INLINE void empty_sum() {
    earlier += reduce_add(sum);
    sum = F{};
  }

  template <bool Bounded>
  EAGLE2_INLINE void follow(const BestValues& best) {
    if (best.count && best.values[0] > peak) {
      // in double: else a product is fused with the difference, and its rounding is lost
      double fall = kFused ? double(origin_of(best.values[0])) - double(origin_of(peak))
                           : double(peak - best.values[0]) * kLog2e;
      float factor = peak == -INFINITY ? 0.0f : float(std::exp2(fall));
      sum = sum * set1(factor);
      earlier *= factor;
      peak = best.values[0];
      origin = set1(origin_of(peak));
    }
    if (best.least > -INFINITY) bar = exponent_of<Bounded>(set1(best.least), origin);
  }
};

// A first look at an eighth of the row: it has k values at or above the k-th largest of the maxima
// of its columns, so nothing below can be chosen. Spares most of the insertions.
template <typename T>
EAGLE2_AS_WRITTEN void look_ahead(const T* logits, int64_t size, BestValues& best,
                                  RunningSum& running) {
  constexpr int64_t kWidth = kStep * kLanes;
  int64_t steps = size / 8 / kWidth;
  if (best.k > kWidth || steps < 4) return;
  F top[kStep];
  for (int i = 0; i < kStep; ++i) top[i] = set1(-INFINITY);
  for (int64_t step = 0; step < steps; ++step)
    for (int i = 0; i < kStep; ++i) top[i] = max(load(logits + step * kWidth + i * kLanes), top[i]);
  float maxima[kWidth];
  for (int i = 0; i < kStep; ++i) store(maxima + i * kLanes, top[i]);
  std::nth_element(maxima, maxima + best.k - 1, maxima + kWidth, std::greater<>());
  float peak = *std::max_element(maxima, maxima + best.k);
  float least = maxima[best.k - 1];
  if (!(std::fabs(peak) < INFINITY && std::fabs(least) < INFINITY)) return;
  best.least = best.refused = std::nextafter(least, -INFINITY);
  running.peak = std::max(running.peak, peak);
  running.origin = set1(origin_of(running.peak));
  running.bar = exponent_of<!kBoundless>(set1(best.least), running.origin);
}

template <bool Bounded, typename T>
EAGLE2_INLINE bool take_step(const T* logits, int64_t first_id, BestValues& best,
                             RunningSum& running) {
  F y[kStep];
  for (int i = 0; i < kStep; i += 2) load_two(logits + i * kLanes, y[i], y[i + 1]);
  for (int i = 0; i < kStep; ++i) y[i] = exponent_of<Bounded>(y[i], running.origin);
  F top = max(max(y[0], y[1]), max(y[2], y[3]));
  // exponents rise with the logits, so nothing above the k-th best is missed
  if (__builtin_expect(greater(running.bar, top) != kAll, 0)) {
    F x[kStep];
    for (int i = 0; i < kStep; ++i) x[i] = load(logits + i * kLanes);
    if (!select(x, first_id, best)) return false;
    running.template follow<Bounded>(best);
    for (int i = 0; i < kStep; ++i) y[i] = exponent_of<Bounded>(x[i], running.origin);
  }
  running.sum = running.sum + ((exp2(y[0]) + exp2(y[1])) + (exp2(y[2]) + exp2(y[3])));
  return true;
}

// False: there is a +inf, or the sum is NaN.
template <bool Bounded, typename T>
EAGLE2_AS_WRITTEN bool take_row(const T* logits, int64_t size, BestValues& best,
                                RunningSum& result) {
  constexpr int64_t kWidth = kStep * kLanes;
  RunningSum running = result;  // in registers
  int64_t i = 0;
  while (i + kWidth <= size) {
    int64_t end = std::min(size, i + 64 * kWidth);
    for (; i + kWidth <= end; i += kWidth)
      if (!take_step<Bounded>(logits + i, i, best, running)) return false;
    running.empty_sum();
    if (std::isnan(running.earlier)) return false;
  }
  float rest[kWidth];
  for (int j = 0; j < kWidth; ++j) rest[j] = i + j < size ? widen(logits[i + j]) : -INFINITY;
  if (i < size && !take_step<true>(rest, i, best, running)) return false;
  running.empty_sum();
  result = running;
  return !std::isnan(running.earlier);
}

// peak: that of the row, or -inf where it is not known. Very large ones on the way to it would make
// the sum NaN.
template <typename T>
RowSum sum_and_select(const T* logits, int64_t size, float peak, BestValues& best) {
  const RunningSum start = {{}, {}, set1(-INFINITY), peak, 0.0};
  RunningSum running = start;
  look_ahead(logits, size, best, running);
  if (!take_row<!kBoundless>(logits, size, best, running)) {
    best.reset(best.k);
    running = start;
    if (!take_row<true>(logits, size, best, running)) return {0, 0, false};
  }
  // beyond, the origin's rounding is no longer small
  if (std::fabs(running.peak) > 0x1p20f && running.peak > -INFINITY) return {0, 0, false};
  double log_total = std::log(running.earlier) + log_of_origin(running.peak);
  return {running.peak, float(std::max(log_total, 0.0)), true};
}
