// Host and device. The order rule: higher score first, then lower index; NaN counts as -inf, -0.0
// as 0.0. One 64-bit key holds both, so no two keys are equal and any selection by key is exact.
#pragma once
#include <cstdint>
#include <cstring>

#include "view.h"

namespace eagle2 {

constexpr uint32_t kOrderDead = 0x007fffff;  // order_bits of -inf: the least there is

// A larger result is a higher score.
EAGLE2_HD uint32_t order_bits(float score) {
  uint32_t bits;
  memcpy(&bits, &score, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return kOrderDead;
  if (bits == 0x80000000) bits = 0;
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

// A larger key comes earlier in the order.
EAGLE2_HD uint64_t order_key(float score, uint32_t index) {
  return uint64_t(order_bits(score)) << 32 | uint32_t(~index);
}

EAGLE2_HD uint32_t index_of(uint64_t key) { return ~uint32_t(key); }

EAGLE2_HD bool is_dead(uint64_t key) { return key >> 32 == kOrderDead; }

}  // namespace eagle2
