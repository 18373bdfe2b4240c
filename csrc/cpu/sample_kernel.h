// One row of logits to one token. No include guard: every_level.h compiles this per level.
constexpr int kGroup = 64;        // ids drawn side by side
constexpr float kMaxGumbel = 23;  // no noise is above gumbel(0) = 22.9
constexpr float kLn2 = 0.69314718f;

EAGLE2_INLINE F finite(F x) { return min(max(x, set1(-INFINITY)), set1(FLT_MAX)); }

inline float finite(float x) { return x != x ? -INFINITY : std::min(x, FLT_MAX); }

template <typename T>
float peak_of(const T* logits, int64_t size) {
  F peaks = set1(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) peaks = max(finite(load(logits + i)), peaks);
  float peak = reduce_max(peaks);
  for (; i < size; ++i) peak = std::max(peak, finite(widen(logits[i])));
  return peak;
}

template <typename T>
int64_t first_at(const T* logits, int64_t size, float value) {
  constexpr uint32_t all = (1u << kLanes) - 1;
  int64_t i = 0;
  while (i + kLanes <= size && greater(set1(value), finite(load(logits + i))) == all) i += kLanes;
  while (finite(widen(logits[i])) != value) ++i;
  return i;
}

// x = (logit - peak) / temperature, filled up to a whole group with -inf.
template <typename T>
void shift_row(const T* logits, int64_t size, float peak, float temperature, float* x) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(x + i, (finite(load(logits + i)) - set1(peak)) / set1(temperature));
  for (; i < size; ++i) x[i] = (finite(widen(logits[i])) - peak) / temperature;
  for (; i % kGroup != 0; ++i) x[i] = -INFINITY;
}

// mass = exp(x) over whole groups.
inline void exp_row(const float* x, int64_t size, float* mass) {
  for (int64_t i = 0; i < size; i += kLanes) store(mass + i, exp(load(x + i)));
}

inline void drop_rest(float* x, int64_t size, Kept kept) {
  for (int32_t i = 0; i < int32_t(size); ++i) {
    bool keep = x[i] > kept.least || (x[i] == kept.least && i <= kept.last_index);
    x[i] = keep ? x[i] : -INFINITY;
  }
}

typedef uint64_t Blocks __attribute__((vector_size(sizeof(F))));  // one Philox block a lane
constexpr int kBlocks = sizeof(Blocks) / 8;

// Product of the low halves of every lane.
template <typename T>
EAGLE2_INLINE T multiply_low(T a, uint32_t b) {
#if EAGLE2_X86
  if constexpr (sizeof(T) == 64) return T(_mm512_mul_epu32(__m512i(a), _mm512_set1_epi64(b)));
  if constexpr (sizeof(T) == 32) return T(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi64x(b)));
#endif
  return (a & 0xffffffff) * b;
}

// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the words
// of a group, block by block. Key: the halves of the seed. Counter: block, the halves of the
// position, 0. Only the low half of a lane counts until the end.
EAGLE2_INLINE void philox(uint64_t seed, uint64_t position, uint64_t first_block,
                          uint64_t* word_pairs) {
  for (int done = 0; done < kGroup / 4; done += kBlocks) {
    Blocks c0, zero = {}, c1 = zero + position, c2 = c1 >> 32, c3 = zero;
    for (int i = 0; i < kBlocks; ++i) c0[i] = first_block + uint64_t(done + i);
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9, key1 += 0xBB67AE85) {
      Blocks product0 = multiply_low(c0, 0xD2511F53), product1 = multiply_low(c2, 0xCD9E8D57);
      c0 = (product1 >> 32) ^ c1 ^ uint64_t(key0);
      c1 = product1;
      c2 = (product0 >> 32) ^ c3 ^ uint64_t(key1);
      c3 = product0;
    }
    Blocks low = (c0 & 0xffffffff) | c1 << 32, high = (c2 & 0xffffffff) | c3 << 32;
    for (int i = 0; i < kBlocks; ++i) {
      word_pairs[2 * (done + i)] = low[i];
      word_pairs[2 * (done + i) + 1] = high[i];
    }
  }
}

// -log(-log(1 - u)), u = word / 2^32. Through double, so that the result does not hang on a
// library's logf.
inline float gumbel(uint32_t word) {
  float u = std::min((float(word) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
  return float(-std::log(double(float(-std::log1p(-double(u))))));
}

struct Draw {
  float best = -INFINITY;
  int64_t token = 0;
};

// Bits of the ids in the group whose x plus noise may reach the best so far. The noise is at most
// -log(u), and the exponent with the mantissa behind it is at most log2(u).
EAGLE2_INLINE uint64_t contenders(const float* x, const uint32_t* words, float best) {
  float bound[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    float u = float(int32_t(words[i] >> 1)) + 0.25f;
    int32_t bits;
    memcpy(&bits, &u, sizeof bits);
    bound[i] = x[i] + (kLn2 * (127 + 31) - float(bits) * (kLn2 * 0x1p-23f));
  }
  const F least = set1(best - 1e-3f);  // more than the bound's rounding
  uint64_t found = 0;
  for (int i = 0; i < kGroup; i += kLanes) found |= uint64_t(greater(load(bound + i), least)) << i;
  return found;
}

inline bool hopeless(const float* x, float best) {
  F peaks = load(x);
  for (int i = kLanes; i < kGroup; i += kLanes) peaks = max(load(x + i), peaks);
  return reduce_max(peaks) + kMaxGumbel < best || reduce_max(peaks) == -INFINITY;
}

// The id with the largest x + gumbel noise, the lowest of equals. `size` in whole groups.
inline int64_t gumbel_argmax(const float* x, int64_t size, uint64_t seed, uint64_t position) {
  Draw draw;
  uint64_t pairs[kGroup / 2];
  uint32_t words[kGroup];
  for (int64_t first = 0; first < size; first += kGroup) {
    if (hopeless(x + first, draw.best)) continue;
    philox(seed, position, uint64_t(first / 4), pairs);
    memcpy(words, pairs, sizeof words);
    uint64_t left = contenders(x + first, words, draw.best);
    for (; left; left &= left - 1) {
      int i = __builtin_ctzll(left);
      float score = x[first + i] + gumbel(words[i]);
      if (score > draw.best) draw = {score, first + i};
    }
  }
  return draw.token;
}
