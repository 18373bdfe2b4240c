// No include guard: see every_level.h. Scores and weights are laid out [keys, rows], vectors run
// over rows, and K and V are broadcast: so a query tile of a whole group shares each K/V load, no
// sum goes across lanes, and any E will do. tree_attention_few.h is for too few rows to fill one.

constexpr int kTile = 64;                         // keys at a time
constexpr int kBlock = kRegisters == 32 ? 8 : 4;  // keys or channels whose sums are in registers
constexpr int kMaxVectors = kLanes == 4 ? 2 : 3;  // vectors of rows whose sums are in registers

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

template <int M>
EAGLE2_AS_WRITTEN void score_block(const float* k, int64_t stride, int64_t count, int64_t dim,
                                   const float* q, float* scores) {
  for (int64_t t = 0; t < count; t += kBlock) {
    F sums[kBlock][M] = {};
    for (int64_t e = 0; e < dim; ++e) {
      F query[M];
      for (int m = 0; m < M; ++m) query[m] = load(q + (e * M + m) * kLanes);
      for (int i = 0; i < kBlock; ++i) {
        F key = set1(k[(t + i) * stride + e]);
        for (int m = 0; m < M; ++m) sums[i][m] = fma(key, query[m], sums[i][m]);
      }
    }
    for (int i = 0; i < kBlock; ++i)
      for (int m = 0; m < M; ++m) store(scores + ((t + i) * M + m) * kLanes, sums[i][m]);
  }
}

template <int M>
EAGLE2_AS_WRITTEN void mix_block(const float* v, int64_t stride, int64_t count, int64_t dim,
                                 const float* weights, const float* decay, float* mixed) {
  for (int64_t e = 0; e < dim; e += kBlock) {
    F sums[kBlock][M];
    for (int i = 0; i < kBlock; ++i)
      for (int m = 0; m < M; ++m)
        sums[i][m] = load(mixed + ((e + i) * M + m) * kLanes) * load(decay + m * kLanes);
    for (int64_t t = 0; t < count; ++t) {
      F weight[M];
      for (int m = 0; m < M; ++m) weight[m] = load(weights + (t * M + m) * kLanes);
      for (int i = 0; i < kBlock; ++i) {
        F value = set1(v[t * stride + e + i]);
        for (int m = 0; m < M; ++m) sums[i][m] = fma(value, weight[m], sums[i][m]);
      }
    }
    for (int i = 0; i < kBlock; ++i)
      for (int m = 0; m < M; ++m) store(mixed + ((e + i) * M + m) * kLanes, sums[i][m]);
  }
}

// Turns scores into weights. A NaN score does not move the peak, but makes weight and total NaN.
template <int M>
EAGLE2_AS_WRITTEN void softmax_block(float* scores, int64_t count, float* peak, float* total,
                                     float* decay) {
  for (int m = 0; m < M; ++m) {
    float* column = scores + m * kLanes;
    F old_peak = load(peak + m * kLanes), new_peak = old_peak, sum = {};
    for (int64_t t = 0; t < count; ++t) new_peak = max(load(column + t * M * kLanes), new_peak);
    for (int64_t t = 0; t < count; ++t) {
      F weight = exp(load(column + t * M * kLanes) - new_peak);
      store(column + t * M * kLanes, weight);
      sum = sum + weight;
    }
    F factor = exp(old_peak - new_peak);
    store(decay + m * kLanes, factor);
    store(total + m * kLanes, load(total + m * kLanes) * factor + sum);
    store(peak + m * kLanes, new_peak);
  }
}

EAGLE2_INLINE void hide_unseen(float* scores, const uint32_t* seen, int64_t rows) {
  const uint32_t dead = to_bits(-INFINITY);
  for (int64_t r = 0; r < rows; ++r)
    scores[r] = from_bits((to_bits(scores[r]) & seen[r]) | (dead & ~seen[r]));
}

struct Tile {
  const float *k, *v;    // [count, padded E], followed by room for kBlock rows
  const uint32_t* seen;  // [count, padded rows]; null = every row sees every key
  int64_t count;
};

struct RowBlock {
  int64_t first_vector, vectors, padded, dim;
  float *q, *mixed, *peak, *total;  // of the whole unit

  template <int M>
  void take(const Tile& tile) const {
    float scores[kTile * M * kLanes], decay[M * kLanes];
    int64_t row = first_vector * kLanes;
    score_block<M>(tile.k, padded_dim(dim), tile.count, dim, q + row * dim, scores);
    if (tile.seen)
      for (int64_t t = 0; t < tile.count; ++t)
        hide_unseen(scores + t * M * kLanes, tile.seen + t * padded + row, M * kLanes);
    softmax_block<M>(scores, tile.count, peak + row, total + row, decay);
    mix_block<M>(tile.v, padded_dim(dim), tile.count, dim, scores, decay, mixed + row * dim);
  }

  void take(const Tile& tile) const {
    if (vectors == 1) take<1>(tile);
    if (vectors == 2) take<2>(tile);
    if constexpr (kMaxVectors > 2)
      if (vectors == 3) take<3>(tile);
  }
};

template <typename T>
void scaled_query(const AttentionUnit& unit, int64_t row, float* to, int64_t step) {
  const Attention& a = *unit.args;
  const T* from = static_cast<const T*>(a.q) + unit.batch_row * a.q_strides[0] +
                  row / unit.group() * a.q_strides[1] +
                  (unit.head * unit.group() + row % unit.group()) * a.q_strides[2];
  for (int64_t e = 0; e < a.dim; ++e) to[e * step] = widen(from[e * a.q_strides[3]]) * a.scale;
}

// The rows in blocks of up to kMaxVectors vectors; q, mixed: per block [E, its rows].
template <typename T>
struct ManyRows {
  const AttentionUnit& unit;
  int64_t rows, dim, vectors, blocks;
  float *q, *mixed, *peak, *total;

  ManyRows(const AttentionUnit& unit, std::vector<float>& memory)
      : unit(unit), rows(unit.rows()), dim(unit.args->dim), vectors((rows + kLanes - 1) / kLanes) {
    blocks = (vectors + kMaxVectors - 1) / kMaxVectors;
    int64_t padded = vectors * kLanes;
    memory.assign(padded * (2 * dim + 2), 0.0f);
    q = memory.data(), mixed = q + padded * dim, peak = mixed + padded * dim, total = peak + padded;
    std::fill(peak, peak + padded, std::numeric_limits<float>::lowest());
    for (int64_t r = 0; r < rows; ++r) scaled_query<T>(unit, r, at(q, r), width(r) * kLanes);
  }

  RowBlock block(int64_t i) const {
    int64_t first = vectors * i / blocks;
    return {first, vectors * (i + 1) / blocks - first, padded_rows(rows), dim, q, mixed, peak,
            total};
  }

  int64_t block_of(int64_t row) const {
    int64_t i = row / kLanes * blocks / vectors;
    while (vectors * (i + 1) / blocks <= row / kLanes) ++i;
    return i;
  }

  int64_t width(int64_t row) const { return block(block_of(row)).vectors; }

  float* at(float* base, int64_t row) const {
    int64_t first = block(block_of(row)).first_vector * kLanes;
    return base + first * dim + (row - first);
  }

  void take(const Tile& tile) const {
    for (int64_t i = 0; i < blocks; ++i) block(i).take(tile);
  }

  void finish() const {
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = at(mixed, r);
      int64_t step = width(r) * kLanes;
      for (int64_t e = 0; e < dim; ++e) unit.out.mixed[r * dim + e] = from[e * step];
      unit.out.peak[r] = peak[r], unit.out.total[r] = total[r];
    }
  }
};

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

#include "cpu/tree_attention_few.h"

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
  for (int64_t slot = unit.first; slot < unit.last; slot += kTile) {
    int64_t count = std::min<int64_t>(kTile, unit.last - slot);
    for (int64_t t = 0; t < count; ++t) k.copy_row(slot + t, k_tile + t * stride);
    for (int64_t t = 0; t < count; ++t) v.copy_row(slot + t, v_tile + t * stride);
    rows.take({k_tile, v_tile, nullptr, count});
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
    rows.take({k_tile, v_tile, unit.keys->seen.data() + key * padded, count});
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
