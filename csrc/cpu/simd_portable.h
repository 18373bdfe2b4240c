// No include guard: every_level.h includes this inside namespace eagle2::cpu::portable.
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
constexpr bool kFused = false;  // fma rounds once
typedef float F __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

EAGLE2_INLINE F load(const float* p) {
  F x;
  memcpy(&x, p, sizeof x);
  return x;
}

EAGLE2_INLINE F load(const Half* p) {
  return F{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}

EAGLE2_INLINE F load(const Bfloat* p) {
  return F{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
}

// Two vectors in whatever order of elements comes cheapest.
template <typename T>
EAGLE2_INLINE void load_two(const T* p, F& a, F& b) {
  a = load(p), b = load(p + kLanes);
}

EAGLE2_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
EAGLE2_INLINE F set1(float x) { return F{x, x, x, x}; }
EAGLE2_INLINE F fma(F a, F b, F c) { return a * b + c; }

// Where a is NaN, b.
EAGLE2_INLINE F max(F a, F b) { return a > b ? a : b; }
EAGLE2_INLINE F min(F a, F b) { return a < b ? a : b; }

// Bit i: a[i] > b[i]; false for NaN.
EAGLE2_INLINE uint32_t greater(F a, F b) {
  Ints yes = a > b;
  return uint32_t((yes[0] & 1) | (yes[1] & 2) | (yes[2] & 4) | (yes[3] & 8));
}

EAGLE2_INLINE float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }

EAGLE2_INLINE float reduce_max(F x) { return std::max(std::max(x[0], x[1]), std::max(x[2], x[3])); }

constexpr bool kBoundless = false;  // exp2 takes any finite exponent
constexpr float kLeastExponent = -126.0f;

// 2^y for y in [kLeastExponent, 127].
EAGLE2_INLINE F exp2(F y) {
  const F magic = set1(0x1.8p23f);  // leaves the rounded exponent in the low bits
  F shifted = y + magic, f = y - (shifted - magic), p = set1(kExp2[0]);
  for (int i = 1; i < 5; ++i) p = fma(p, f, set1(kExp2[i]));
  return F(Words(fma(p, f, set1(1.0f))) + (Words(shifted) << 23));
}

// exp(x) for x <= 88: 0 below -87.3, NaN for NaN.
EAGLE2_INLINE F exp(F x) {
  F power = exp2(max(set1(kLeastExponent), x * set1(kLog2e)));
  return F(Ints(power) & ~(x < set1(-87.3f)));
}

// Sums of four vectors, side by side.
EAGLE2_INLINE void store_sums(float* out, F a, F b, F c, F d) {
  out[0] = reduce_add(a), out[1] = reduce_add(b);
  out[2] = reduce_add(c), out[3] = reduce_add(d);
}
