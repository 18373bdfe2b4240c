// One kernel source, three instruction sets. A kernel is written against the names of simd_*.h,
// every_level.h compiles it once per level, and EAGLE2_AT_LEVEL calls the best that this CPU has.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define EAGLE2_X86 1
#include <immintrin.h>
#else
#define EAGLE2_X86 0
#endif

#define EAGLE2_INLINE inline __attribute__((always_inline))

// For loops that are written in vectors: GCC's own vectorizer would take them apart again.
#if defined(__GNUC__) && !defined(__clang__)
#define EAGLE2_AS_WRITTEN \
  __attribute__((optimize("no-tree-loop-vectorize", "no-tree-slp-vectorize")))
#else
#define EAGLE2_AS_WRITTEN
#endif

namespace eagle2::cpu {

struct Half {
  uint16_t bits;
};

struct Bfloat {
  uint16_t bits;
};

enum Level { kPortable, kAvx2, kAvx512 };

// Tests lower it, so that every level is run on one machine. Results do not depend on it beyond
// the rounding of sums.
inline std::atomic<int> level_cap{kAvx512};

inline int cpu_level() {
#if EAGLE2_X86
  static const int level = [] {
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                __builtin_cpu_supports("f16c");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx2 && avx512 ? kAvx512 : avx2 ? kAvx2 : kPortable;
  }();
  return level;
#else
  return kPortable;
#endif
}

inline int level() { return std::min(cpu_level(), level_cap.load(std::memory_order_relaxed)); }

#if EAGLE2_X86
#define EAGLE2_AT_LEVEL(function)                                                      \
  (::eagle2::cpu::level() == ::eagle2::cpu::kAvx512 ? &::eagle2::cpu::avx512::function \
   : ::eagle2::cpu::level() == ::eagle2::cpu::kAvx2 ? &::eagle2::cpu::avx2::function   \
                                                    : &::eagle2::cpu::portable::function)
#else
#define EAGLE2_AT_LEVEL(function) (&::eagle2::cpu::portable::function)
#endif

EAGLE2_INLINE float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

EAGLE2_INLINE uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(float value) { return value; }

inline float widen(Bfloat value) { return from_bits(uint32_t(value.bits) << 16); }

inline float widen(Half value) {
  uint32_t sign = uint32_t(value.bits & 0x8000) << 16, rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + 0x38000000));
  float subnormal = float(rest) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

// To nearest, ties to even; NaN stays NaN.
inline void narrow(float value, float* out) { *out = value; }

inline void narrow(float value, Bfloat* out) {
  uint32_t bits = to_bits(value);
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  out->bits = nan ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void narrow(float value, Half* out) {
  uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00;
  } else if (rest >= 0x47800000) {
    half = 0x7c00;
  } else if (rest >= 0x38800000) {
    half = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  } else {
    // adding 0.5 leaves the subnormal's bits, rounded, at the low end of the mantissa
    half = to_bits(from_bits(rest) + 0.5f) - 0x3f000000;
  }
  out->bits = uint16_t(sign | half);
}

// 2^f - 1 on [-0.5, 0.5] as a polynomial without constant term, relative error of 2^f 2e-7.
constexpr float kExp2[] = {1.3264724e-3f, 9.6715132e-3f, 5.5507338e-2f, 2.4022242e-1f,
                           6.9314698e-1f};
constexpr float kLog2e = 1.4426950408889634f;

}  // namespace eagle2::cpu
