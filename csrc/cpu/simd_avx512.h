// No include guard: every_level.h includes this inside namespace eagle2::cpu::avx512.
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
constexpr bool kFused = true;  // fma rounds once
using F = __m512;
using Words = __m512i;

EAGLE2_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }

EAGLE2_INLINE F load(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

EAGLE2_INLINE F load(const Bfloat* p) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Two vectors in whatever order of elements comes cheapest.
template <typename T>
EAGLE2_INLINE void load_two(const T* p, F& a, F& b) {
  a = load(p), b = load(p + kLanes);
}

EAGLE2_INLINE void load_two(const Bfloat* p, F& a, F& b) {
  __m512i bits = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000))));
}

EAGLE2_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
EAGLE2_INLINE F set1(float x) { return _mm512_set1_ps(x); }
EAGLE2_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

// Where a is NaN, b.
EAGLE2_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
EAGLE2_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }

// Bit i: a[i] > b[i]; false for NaN.
EAGLE2_INLINE uint32_t greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

EAGLE2_INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
EAGLE2_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

constexpr bool kBoundless = true;  // exp2 takes any finite exponent
constexpr float kLeastExponent = -300.0f;

// 2^y for y <= 127.
EAGLE2_INLINE F exp2(F y) {
  F n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  F f = y - n, p = set1(kExp2[0]);
  for (int i = 1; i < 5; ++i) p = fma(p, f, set1(kExp2[i]));
  return _mm512_scalef_ps(fma(p, f, set1(1.0f)), n);
}

// exp(x) for x <= 88: 0 for -inf, NaN for NaN.
EAGLE2_INLINE F exp(F x) { return exp2(max(set1(kLeastExponent), x * set1(kLog2e))); }

// Sums of four vectors, side by side.
EAGLE2_INLINE void store_sums(float* out, F a, F b, F c, F d) {
  F ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  F cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  F all = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
  __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
  _mm_storeu_ps(out, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
}
