// No include guard: see every_level.h. K and V pass by in tiles of float32; tree_attention_many.h
// and tree_attention_few.h hold what the rows do with a tile.

constexpr int kTile = 64;  // keys at a time

template <typename T>
EAGLE2_INLINE void convert_row(const T* from, int64_t stride, int64_t dim, float* to) {
  int64_t e = 0;
  if (stride == 1)
    for (; e + kLanes <= dim; e += kLanes) store(to + e, load(from + e));
  for (; e < dim; ++e) to[e] = widen(from[e * stride]);
  for (; e % kLanes; ++e) to[e] = 0.0f;
}

EAGLE2_INLINE int64_t padded_dim(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

template <typename T>
struct Cache {
  const Attention& args;
  const T* data;
  const int64_t* strides;
  int64_t batch_row, head;

  EAGLE2_INLINE const T* row(int64_t slot) const {
    int64_t block = batch_row;
    if (args.block_table) {
      int32_t entry = args.block_table[batch_row * args.table_columns + slot / args.block_rows];
      block = std::min<int64_t>(std::max(entry, 0), args.blocks - 1);
      slot %= args.block_rows;
    }
    return data + block * strides[0] + slot * strides[1] + head * strides[2];
  }

  EAGLE2_INLINE void copy_row(int64_t slot, float* to) const {
    convert_row(row(slot), strides[3], args.dim, to);
  }
};

struct Tile {
  const float *k, *v;  // [count, padded E], each row `stride` from the next; may be read past
  int64_t k_stride, v_stride;
  const uint32_t* seen;  // [count, padded rows]; null = every row sees every key
  int64_t count;
};

template <typename T>
void scaled_query(const AttentionUnit& unit, int64_t row, float* to, int64_t step) {
  const Attention& a = *unit.args;
  const T* from = static_cast<const T*>(a.q) + unit.batch_row * a.q_strides[0] +
                  row / unit.group() * a.q_strides[1] +
                  (unit.head * unit.group() + row % unit.group()) * a.q_strides[2];
  for (int64_t e = 0; e < a.dim; ++e) to[e * step] = widen(from[e * a.q_strides[3]]) * a.scale;
}

#include "cpu/tree_attention_few.h"
#include "cpu/tree_attention_many.h"

// A value that is not finite reaches only the rows that see it: 0 * NaN would reach all.
EAGLE2_INLINE void take_out_bad(float* v, int64_t key, int64_t dim,
                                std::vector<std::pair<int64_t, int64_t>>& bad) {
  uint32_t largest = 0;
  for (int64_t e = 0; e < dim; ++e) largest = std::max(largest, to_bits(v[e]) & 0x7fffffff);
  if (largest < 0x7f800000) return;
  for (int64_t e = 0; e < dim; ++e) {
    if (std::isfinite(v[e])) continue;
    v[e] = 0.0f;
    bad.emplace_back(key, e);
  }
}

template <typename T, typename Rows>
void attend_with(const AttentionUnit& unit, std::vector<float>& rows_memory,
                 std::vector<float>& tile_memory) {
  const Attention& a = *unit.args;
  Cache<T> k = {a, static_cast<const T*>(a.k), a.k_strides, unit.batch_row, unit.head};
  Cache<T> v = {a, static_cast<const T*>(a.v), a.v_strides, unit.batch_row, unit.head};
  Rows rows(unit, rows_memory);
  int64_t stride = padded_dim(a.dim), padded = padded_rows(unit.rows());
  tile_memory.resize(2 * (kTile + kBlock) * stride);
  float *k_tile = tile_memory.data(), *v_tile = k_tile + (kTile + kBlock) * stride;
  bool in_place = !a.block_table && a.dim % kLanes == 0 && k.strides[3] == 1 && v.strides[3] == 1;
  for (int64_t slot = unit.first; slot < unit.last; slot += kTile) {
    int64_t count = std::min<int64_t>(kTile, unit.last - slot);
    if constexpr (Rows::kInPlace && std::is_same_v<T, float>)
      if (in_place && count == kTile) {
        rows.take({k.row(slot), v.row(slot), k.strides[1], v.strides[1], nullptr, count});
        continue;
      }
    for (int64_t t = 0; t < count; ++t) k.copy_row(slot + t, k_tile + t * stride);
    for (int64_t t = 0; t < count; ++t) v.copy_row(slot + t, v_tile + t * stride);
    rows.take({k_tile, v_tile, stride, stride, nullptr, count});
  }
  std::vector<std::pair<int64_t, int64_t>> bad;  // masked key, channel
  int64_t masked = unit.with_masked ? int64_t(unit.keys->slots.size()) : 0;
  for (int64_t key = 0; key < masked; key += kTile) {
    int64_t count = std::min<int64_t>(kTile, masked - key);
    for (int64_t t = 0; t < count; ++t) {
      k.copy_row(unit.keys->slots[key + t], k_tile + t * stride);
      v.copy_row(unit.keys->slots[key + t], v_tile + t * stride);
      take_out_bad(v_tile + t * stride, key + t, a.dim, bad);
    }
    rows.take({k_tile, v_tile, stride, stride, unit.keys->seen.data() + key * padded, count});
  }
  rows.finish();
  for (auto [key, channel] : bad)
    for (int64_t r = 0; r < unit.rows(); ++r)
      if (unit.keys->seen[key * padded + r]) unit.out.mixed[r * a.dim + channel] = NAN;
}

template <typename T>
void attend_in(const AttentionUnit& unit) {
  static thread_local std::vector<float> rows_memory, tile_memory;
  if (unit.rows() > kLanes / 2)
    attend_with<T, ManyRows<T>>(unit, rows_memory, tile_memory);
  else
    attend_with<T, FewRows<T>>(unit, rows_memory, tile_memory);
}

inline void attend(const AttentionUnit& unit) {
  if (unit.args->dtype == Dtype::kFloat) attend_in<float>(unit);
  if (unit.args->dtype == Dtype::kHalf) attend_in<Half>(unit);
  if (unit.args->dtype == Dtype::kBfloat) attend_in<Bfloat>(unit);
}

// Merges the parts of one head and writes its rows of the output.
template <typename T>
void merge_in(const AttentionUnit& unit, const Partial* parts, int count) {
  const Attention& a = *unit.args;
  int64_t group = unit.group(), dim = a.dim;
  std::vector<float> mixed(dim);
  for (int64_t r = 0; r < unit.rows(); ++r) {
    T* out =
        static_cast<T*>(a.out) +
        ((unit.batch_row * a.nodes + r / group) * a.heads + unit.head * group + r % group) * dim;
    float peak = std::numeric_limits<float>::lowest(), total = 0.0f;
    for (int i = 0; i < count; ++i) peak = std::max(peak, parts[i].peak[r]);
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    for (int i = 0; i < count; ++i) {
      float factor = std::exp(parts[i].peak[r] - peak);
      total += factor * parts[i].total[r];
      const float* from = parts[i].mixed + r * dim;
      for (int64_t e = 0; e < dim; ++e) mixed[e] += factor * from[e];
    }
    bool live = unit.keys->live[r / group];
    for (int64_t e = 0; e < dim; ++e) narrow(live ? mixed[e] / total : 0.0f, out + e);
  }
}

inline void merge(const AttentionUnit& unit, const Partial* parts, int count) {
  if (unit.args->dtype == Dtype::kFloat) merge_in<float>(unit, parts, count);
  if (unit.args->dtype == Dtype::kHalf) merge_in<Half>(unit, parts, count);
  if (unit.args->dtype == Dtype::kBfloat) merge_in<Bfloat>(unit, parts, count);
}
