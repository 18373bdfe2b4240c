// No include guard: part of tree_attention_kernel.h. Where the rows would not fill a vector, as in
// plain decoding: vectors run over the head dim; scores are laid out [rows, keys].

template <int R>
EAGLE2_AS_WRITTEN void score_few(const float* k, int64_t k_stride, int64_t count, const float* q,
                                 int64_t dim, float* scores) {
  for (int64_t t = 0; t < count; t += 4) {
    F sums[R][4] = {};
    for (int64_t e = 0; e < dim; e += kLanes)
      for (int i = 0; i < 4; ++i) {
        F key = load(k + (t + i) * k_stride + e);
        for (int r = 0; r < R; ++r) sums[r][i] = fma(load(q + r * dim + e), key, sums[r][i]);
      }
    for (int r = 0; r < R; ++r)
      store_sums(scores + r * kTile + t, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
}

template <int R, int Vectors>
EAGLE2_AS_WRITTEN void mix_few(const float* v, int64_t v_stride, int64_t count,
                               const float* weights, const float* decay, int64_t dim,
                               float* mixed) {
  F sums[R][Vectors];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < Vectors; ++i)
      sums[r][i] = load(mixed + r * dim + i * kLanes) * set1(decay[r]);
  for (int64_t t = 0; t < count; ++t)
    for (int i = 0; i < Vectors; ++i) {
      F value = load(v + t * v_stride + i * kLanes);
      for (int r = 0; r < R; ++r) sums[r][i] = fma(set1(weights[r * kTile + t]), value, sums[r][i]);
    }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < Vectors; ++i) store(mixed + r * dim + i * kLanes, sums[r][i]);
}

// One row's scores, padded to whole vectors with -inf; returns the factor for what came before.
EAGLE2_INLINE float softmax_few(float* scores, int64_t padded, float* peak, float* total) {
  F largest = set1(*peak), sum = {};
  for (int64_t t = 0; t < padded; t += kLanes) largest = max(load(scores + t), largest);
  float new_peak = reduce_max(largest);
  for (int64_t t = 0; t < padded; t += kLanes) {
    F weight = exp(load(scores + t) - set1(new_peak));
    store(scores + t, weight);
    sum = sum + weight;
  }
  float factor = std::exp(*peak - new_peak);
  *total = *total * factor + reduce_add(sum);
  *peak = new_peak;
  return factor;
}

template <typename T>
struct FewRows {
  static constexpr bool kInPlace = true;

  const AttentionUnit& unit;
  int64_t rows, dim, stride;
  float *q, *mixed, *peak, *total;

  FewRows(const AttentionUnit& unit, std::vector<float>& memory)
      : unit(unit), rows(unit.rows()), dim(unit.args->dim), stride(padded_dim(dim)) {
    memory.assign(rows * (2 * stride + 2), 0.0f);
    q = memory.data(), mixed = q + rows * stride, peak = mixed + rows * stride, total = peak + rows;
    std::fill(peak, peak + rows, std::numeric_limits<float>::lowest());
    for (int64_t r = 0; r < rows; ++r) scaled_query<T>(unit, r, q + r * stride, 1);
  }

  template <int R>
  void take(const Tile& tile, int64_t row) const {
    float scores[R * kTile], decay[R];
    score_few<R>(tile.k, tile.k_stride, tile.count, q + row * stride, stride, scores);
    int64_t padded = (tile.count + kLanes - 1) / kLanes * kLanes;
    for (int r = 0; r < R; ++r) {
      float* line = scores + r * kTile;
      if (tile.seen)
        for (int64_t t = 0; t < tile.count; ++t)
          if (!tile.seen[t * padded_rows(rows) + row + r]) line[t] = -INFINITY;
      for (int64_t t = tile.count; t < padded; ++t) line[t] = -INFINITY;
      decay[r] = softmax_few(line, padded, peak + row + r, total + row + r);
    }
    int64_t e = 0;
    for (; e + 4 * kLanes <= stride; e += 4 * kLanes)
      mix_few<R, 4>(tile.v + e, tile.v_stride, tile.count, scores, decay, stride,
                    mixed + row * stride + e);
    for (; e < stride; e += kLanes)
      mix_few<R, 1>(tile.v + e, tile.v_stride, tile.count, scores, decay, stride,
                    mixed + row * stride + e);
  }

  void take(const Tile& tile) const {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) take<4>(tile, row);
    if (rows - row == 3) take<3>(tile, row);
    if (rows - row == 2) take<2>(tile, row);
    if (rows - row == 1) take<1>(tile, row);
  }

  void finish() const {
    for (int64_t r = 0; r < rows; ++r) {
      std::copy(mixed + r * stride, mixed + r * stride + dim, unit.out.mixed + r * dim);
      unit.out.peak[r] = peak[r], unit.out.total[r] = total[r];
    }
  }
};
