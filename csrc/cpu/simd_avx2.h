// No include guard: every_level.h includes this inside namespace eagle2::cpu::avx2.
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
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

// 2^y for y in [-126, 126].
EAGLE2_INLINE F exp2_in_range(F y) {
  F n = _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  F f = y - n, p = set1(kExp2[0]);
  for (int i = 1; i < 5; ++i) p = fma(p, f, set1(kExp2[i]));
  __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  F scale = _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
  return fma(p, f, set1(1.0f)) * scale;
}

// exp(x) for x <= 88: 0 below -87.3, NaN for NaN.
EAGLE2_INLINE F exp(F x) {
  F y = max(set1(-126.0f), x * set1(kLog2e));
  return _mm256_and_ps(_mm256_cmp_ps(x, set1(-87.3f), _CMP_NLT_UQ), exp2_in_range(y));
}

// Sums of four vectors, side by side.
EAGLE2_INLINE void store_sums(float* out, F a, F b, F c, F d) {
  F all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
}
