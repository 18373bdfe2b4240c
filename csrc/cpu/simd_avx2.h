// No include guard: every_level.h includes this inside namespace eagle2::cpu::avx2.
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
constexpr bool kFused = true;  // fma rounds once
using F = __m256;
using Words = __m256i;

EAGLE2_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }

EAGLE2_INLINE F load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

EAGLE2_INLINE F load(const Bfloat* p) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Two vectors in whatever order of elements comes cheapest.
template <typename T>
EAGLE2_INLINE void load_two(const T* p, F& a, F& b) {
  a = load(p), b = load(p + kLanes);
}

EAGLE2_INLINE void load_two(const Bfloat* p, F& a, F& b) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  a = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000))));
}

EAGLE2_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
EAGLE2_INLINE F set1(float x) { return _mm256_set1_ps(x); }
EAGLE2_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

// Where a is NaN, b.
EAGLE2_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
EAGLE2_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }

// Bit i: a[i] > b[i]; false for NaN.
EAGLE2_INLINE uint32_t greater(F a, F b) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}

EAGLE2_INLINE float reduce_add(F x) {
  __m128 quad = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  quad = quad + _mm_movehl_ps(quad, quad);
  return _mm_cvtss_f32(_mm_add_ss(quad, _mm_movehdup_ps(quad)));
}

EAGLE2_INLINE float reduce_max(F x) {
  __m128 quad = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  quad = _mm_max_ps(quad, _mm_movehl_ps(quad, quad));
  return _mm_cvtss_f32(_mm_max_ss(quad, _mm_movehdup_ps(quad)));
}

constexpr bool kBoundless = false;  // exp2 takes any finite exponent
constexpr float kLeastExponent = -126.0f;

// 2^y for y in [kLeastExponent, 127].
EAGLE2_INLINE F exp2(F y) {
  const F magic = set1(0x1.8p23f);  // leaves the rounded exponent in the low bits
  F shifted = y + magic, f = y - (shifted - magic), p = set1(kExp2[0]);
  for (int i = 1; i < 5; ++i) p = fma(p, f, set1(kExp2[i]));
  __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  __m256i bits = _mm256_castps_si256(fma(p, f, set1(1.0f)));
  return _mm256_castsi256_ps(_mm256_add_epi32(bits, exponent));
}

// exp(x) for x <= 88: 0 below -87.3, NaN for NaN.
EAGLE2_INLINE F exp(F x) {
  F power = exp2(max(set1(kLeastExponent), x * set1(kLog2e)));
  return _mm256_and_ps(_mm256_cmp_ps(x, set1(-87.3f), _CMP_NLT_UQ), power);
}

// Sums of four vectors, side by side.
EAGLE2_INLINE void store_sums(float* out, F a, F b, F c, F d) {
  F all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
}
