// No include guard: part of tree_attention_kernel.h. Scores and weights are laid out [keys, rows],
// vectors run over rows, and K and V are broadcast: a query tile of a whole group shares each load
// of K and V, no sum goes across lanes, and any E will do.

constexpr int kBlock = kRegisters == 32 ? 8 : 4;  // keys or channels whose sums are in registers
constexpr int kMaxVectors = kLanes == 4 ? 2 : 3;  // vectors of rows whose sums are in registers

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

struct RowBlock {
  int64_t first_vector, vectors, padded, dim;
  float *q, *mixed, *peak, *total;  // of the whole unit

  template <int M>
  void take(const Tile& tile) const {
    float scores[kTile * M * kLanes], decay[M * kLanes];
    int64_t row = first_vector * kLanes;
    score_block<M>(tile.k, tile.k_stride, tile.count, dim, q + row * dim, scores);
    if (tile.seen)
      for (int64_t t = 0; t < tile.count; ++t)
        hide_unseen(scores + t * M * kLanes, tile.seen + t * padded + row, M * kLanes);
    softmax_block<M>(scores, tile.count, peak + row, total + row, decay);
    mix_block<M>(tile.v, tile.v_stride, tile.count, dim, scores, decay, mixed + row * dim);
  }

  void take(const Tile& tile) const {
    if (vectors == 1) take<1>(tile);
    if (vectors == 2) take<2>(tile);
    if constexpr (kMaxVectors > 2)
      if (vectors == 3) take<3>(tile);
  }
};

// The rows in blocks of up to kMaxVectors vectors; q, mixed: per block [E, its rows].
template <typename T>
struct ManyRows {
  static constexpr bool kInPlace = false;  // tiles are read once per block: better side by side

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
