// The C++ form on random and malformed input under ASan and UBSan, then from several threads under
// TSan: make sanitize. Results are compared in tests/test_cpp.py; here every access counts, and the
// laws of a tree.
#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "cpu/operators.h"
#include "cpu/simd.h"
#include "order.h"
#include "tree.h"

using namespace eagle2;

namespace {

thread_local std::mt19937 random_bits(7);

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

float score() {
  const float scores[] = {0.0f,   -0.0f, -1.0f,    -2.5f,     -3e38f,
                          1e-45f, 4.0f,  INFINITY, -INFINITY, NAN};
  return scores[between(0, 9)];
}

template <typename T>
Matrix<const T> rows(const std::vector<T>& values, int64_t columns) {
  return {values.data(), columns, 1};
}

template <typename T, typename Draw>
std::vector<T> drawn(int64_t count, const Draw& draw) {
  std::vector<T> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(T(draw()));
  return values;
}

void check_select_leaves(int64_t batch, int64_t columns, int64_t k, int num_threads) {
  auto scores = drawn<float>(batch * columns, score);
  std::vector<int32_t> index(batch * k);
  cpu::select_leaves(rows(scores, columns), batch, columns, k, index.data(), num_threads);
  for (int64_t i = 1; i < batch * k; ++i) {
    if (i % k == 0) continue;
    const float* row = scores.data() + i / k * columns;
    assert(order_key(row[index[i - 1]], index[i - 1]) > order_key(row[index[i]], index[i]));
  }
}

void check_enter_level(int64_t batch, int64_t leaves, int64_t children, int num_threads) {
  int64_t size = leaves * children, begin = between(0, 20), columns = begin + size;
  int64_t words = between(1, 3), k = between(1, size);
  auto all_tokens = drawn<int64_t>(batch * columns, [] { return between(0, 9); });
  auto all_scores = drawn<float>(batch * columns, score);
  auto tokens = drawn<int64_t>(batch * size, [] { return between(0, 9); });
  auto scores = drawn<float>(batch * size, score);
  auto parents = drawn<int32_t>(batch * leaves, [&] { return between(-1, begin); });
  auto masks = drawn<uint64_t>(batch * leaves * words, [] { return between(0, 1 << 20); });
  auto num_nodes = drawn<int32_t>(batch, [&] { return between(0, columns + 2); });
  std::vector<int32_t> all_parents(batch * columns);
  cpu::LevelRows level = {{all_tokens.data(), columns, 1},
                          {all_scores.data(), columns, 1},
                          {all_parents.data(), columns, 1},
                          begin,
                          {tokens.data(), {size, children, 1}},
                          {scores.data(), {size, children, 1}},
                          {parents.data(), leaves, 1},
                          {masks.data(), {leaves * words, words, 1}},
                          {num_nodes.data(), 1},
                          batch,
                          leaves,
                          children,
                          words,
                          between(0, std::max<int64_t>(64 * words - k, 0)),
                          std::min(k, 64 * words)};
  k = level.k;
  std::vector<int64_t> out_tokens(batch * k), ranks(batch * k);
  std::vector<float> out_scores(batch * k);
  std::vector<int32_t> out_parents(batch * k), live(batch);
  std::vector<uint64_t> out_words(batch * k * words);
  cpu::enter_level(level,
                   {out_tokens.data(), out_scores.data(), out_parents.data(), ranks.data(),
                    out_words.data(), live.data()},
                   num_threads);
  for (int64_t i = 0; i < batch * k; ++i) {
    assert(out_parents[i] >= begin && out_parents[i] < columns);
    assert(ranks[i] == (out_parents[i] - begin) / children);
    assert(out_tokens[i] == all_tokens[i / k * columns + out_parents[i]]);
  }
  for (int32_t count : live) assert(count >= 0 && count <= k);
}

struct OwnedTree {
  std::vector<int64_t> tokens;
  std::vector<int32_t> parents, depths, num_nodes;
  std::vector<uint64_t> ancestors;
  std::vector<float> scores;

  OwnedTree(int64_t batch, int64_t columns)
      : tokens(batch * columns),
        parents(batch * columns),
        depths(batch * columns),
        num_nodes(batch),
        ancestors(batch * columns * num_words(columns)),
        scores(batch * columns) {}

  TreeRows rows() {
    return {tokens.data(),    parents.data(), depths.data(),
            ancestors.data(), scores.data(),  num_nodes.data()};
  }
};

OwnedTree check_rerank(int64_t batch, int64_t columns, int64_t max_nodes, int num_threads) {
  auto tokens = drawn<int64_t>(batch * columns, [] { return between(0, 3); });
  auto scores = drawn<float>(batch * columns, score);
  auto parents = drawn<int32_t>(batch * columns, [=] { return between(-3, columns + 1); });
  auto roots = drawn<int64_t>(batch, [] { return between(0, 3); });
  auto wanted = drawn<int32_t>(batch, [=] { return between(-2, max_nodes + 2); });
  CandidateRows candidates = {rows(tokens, columns), rows(scores, columns), rows(parents, columns),
                              batch, columns};
  OwnedTree tree(batch, max_nodes);
  cpu::rerank(candidates, {roots.data(), 1}, {wanted.data(), 1}, max_nodes, tree.rows(),
              num_threads);
  for (int64_t i = 0; i < batch * max_nodes; ++i) {
    int64_t row = i / max_nodes, node = i % max_nodes;
    bool child = node > 0 && node < tree.num_nodes[row];
    assert(child ? tree.parents[i] >= 0 && tree.parents[i] < node : tree.parents[i] == -1);
  }
  return tree;
}

void check_accept(const OwnedTree& tree, int64_t batch, int64_t columns, int num_threads) {
  int64_t vocab = between(1, 200), depth = between(0, columns + 2);
  auto logits = drawn<float>(batch * columns * vocab, score);
  auto temperature = drawn<float>(batch, [] { return float(between(-1, 3)); });
  auto top_k = drawn<int32_t>(batch, [=] { return between(-1, vocab + 2); });
  auto top_p = drawn<float>(batch, [] { return 0.25f * float(between(0, 5)); });
  auto min_p = drawn<float>(batch, [] { return 0.25f * float(between(0, 5)); });
  auto seed = drawn<int64_t>(batch, [] { return between(INT64_MIN, INT64_MAX); });
  auto positions = drawn<int64_t>(batch * columns, [] { return between(0, INT64_MAX); });
  cpu::SampleRows law = {logits.data(),
                         cpu::Dtype::kFloat,
                         {columns * vocab, vocab, 1},
                         batch,
                         columns,
                         vocab,
                         {temperature.data(), 1},
                         {top_k.data(), 1},
                         {top_p.data(), 1},
                         {min_p.data(), 1},
                         {seed.data(), 1},
                         rows(positions, columns)};
  std::vector<int64_t> tokens(batch * columns), bonus(batch), same_bonus(batch);
  std::vector<int32_t> path(batch * (depth + 1)), same_path(path), length(batch),
      same_length(batch);
  std::vector<int64_t> path_tokens(path.size());
  cpu::sample(law, tokens.data(), num_threads);
  for (int64_t token : tokens) assert(token >= -1 && token < vocab);
  VerifyRows walk = {rows(tree.tokens, columns),
                     rows(tree.parents, columns),
                     {tree.num_nodes.data(), 1},
                     rows(tokens, columns),
                     batch,
                     columns};
  cpu::verify(walk, depth, path.data(), length.data(), bonus.data(), num_threads);
  cpu::accept(walk, law, depth, same_path.data(), same_length.data(), same_bonus.data(),
              path_tokens.data(), num_threads);
  assert(path == same_path && length == same_length && bonus == same_bonus);
  for (int64_t i = 0; i < int64_t(path.size()); ++i) {
    int64_t row = i / (depth + 1);
    assert(path_tokens[i] == (path[i] < 0 ? -1 : tokens[row * columns + path[i]]));
  }
}

void check_verify(const OwnedTree& tree, int64_t batch, int64_t columns, int num_threads) {
  auto target_tokens = drawn<int64_t>(batch * columns, [] { return between(0, 3); });
  int64_t depth = between(0, columns + 2);
  std::vector<int32_t> path(batch * (depth + 1)), accept_length(batch);
  std::vector<int64_t> bonus(batch);
  VerifyRows walk = {rows(tree.tokens, columns),
                     rows(tree.parents, columns),
                     {tree.num_nodes.data(), 1},
                     rows(target_tokens, columns),
                     batch,
                     columns};
  cpu::verify(walk, depth, path.data(), accept_length.data(), bonus.data(), num_threads);
  for (int64_t row = 0; row < batch; ++row)
    assert(accept_length[row] >= 0 && accept_length[row] <= depth);
}

void check_expand(int64_t leaves, int64_t vocab, int num_threads) {
  bool every_other = between(0, 1);
  auto logits = drawn<float>(leaves * vocab * (1 + every_other), score);
  auto map = drawn<int64_t>(vocab, [] { return between(0, 99); });
  int64_t k = between(1, vocab);
  std::vector<float> leaf_scores(leaves, -1.0f), scores(leaves * k);
  std::vector<int64_t> tokens(leaves * k);
  cpu::ExpandRows args = {logits.data(),
                          cpu::Dtype::kFloat,
                          {0, vocab * (1 + every_other), 1 + every_other},
                          1,
                          leaves,
                          vocab,
                          k,
                          rows(leaf_scores, leaves),
                          {map.data(), 1}};
  cpu::expand(args, tokens.data(), scores.data(), num_threads);
  for (float child : scores) assert(child <= -1.0f);
}

// Caches of one exact row more than is in use, contiguous or in blocks.
void check_tree_attention(int num_threads) {
  int64_t nodes = between(1, 70), words = num_words(nodes), group = between(1, 5);
  int64_t kv_heads = between(1, 3), dim = 8 * between(1, 10), batch = between(0, 3);
  int64_t block_rows = between(1, 5), columns = between(1, 40);
  bool paged = between(0, 1);
  if (!paged) block_rows = between(1, 200);
  int64_t blocks = paged ? between(1, 9) : batch,
          capacity = paged ? columns * block_rows : block_rows;
  auto q = drawn<float>(batch * nodes * kv_heads * group * dim, score);
  auto k = drawn<float>(blocks * block_rows * kv_heads * dim, score), v = k;
  auto prefix_len = drawn<int32_t>(batch, [=] { return between(-1, capacity + 2); });
  auto num_nodes = drawn<int32_t>(batch, [=] { return between(-1, nodes + 2); });
  auto table = drawn<int32_t>(batch * columns, [=] { return between(-1, blocks); });
  auto ancestors = drawn<uint64_t>(batch * nodes * words, [] {
    return uint64_t(random_bits()) << 32 & random_bits() * uint64_t(0x100000001);
  });
  std::vector<float> out(q.size());
  cpu::Attention args = {};
  args.q = q.data(), args.k = k.data(), args.v = v.data(), args.out = out.data();
  args.batch = batch, args.nodes = nodes, args.heads = kv_heads * group, args.dim = dim;
  args.kv_heads = kv_heads, args.words = words, args.blocks = blocks, args.block_rows = block_rows;
  int64_t q_strides[] = {nodes * args.heads * dim, args.heads * dim, dim, 1};
  int64_t strides[] = {block_rows * kv_heads * dim, kv_heads * dim, dim, 1};
  std::copy(q_strides, q_strides + 4, args.q_strides);
  std::copy(strides, strides + 4, args.k_strides);
  std::copy(strides, strides + 4, args.v_strides);
  args.prefix_len = prefix_len.data(), args.num_nodes = num_nodes.data();
  args.ancestors = ancestors.data(), args.block_table = paged ? table.data() : nullptr;
  args.table_columns = columns, args.scale = 0.3f;
  args.window = between(0, 1) ? between(1, 50) : INT64_C(1) << 62;
  cpu::tree_attention(args, num_threads);
}

void check_compact_kv(int num_threads) {
  int64_t layers = between(0, 3), batch = between(1, 4), heads = between(1, 3), dim = between(1, 9);
  int64_t block_rows = between(1, 30), columns = between(1, 5), width = between(1, 9);
  bool paged = between(0, 1);
  int64_t blocks = paged ? between(1, 9) : batch;
  std::vector<float> k(layers * blocks * block_rows * heads * dim), v = k;
  auto path = drawn<int32_t>(batch * width, [] { return between(-2, 40); });
  auto length = drawn<int32_t>(batch, [=] { return between(-1, width + 1); });
  auto prefix_len = drawn<int32_t>(batch, [] { return between(-3, 40); });
  auto table = drawn<int32_t>(batch * columns, [=] { return between(-1, blocks); });
  CacheBytes caches[] = {{reinterpret_cast<char*>(k.data()), {}},
                         {reinterpret_cast<char*>(v.data()), {}}};
  for (CacheBytes& cache : caches) {
    cache.strides[4] = 4, cache.strides[3] = 4 * dim, cache.strides[2] = 4 * dim * heads;
    cache.strides[1] = cache.strides[2] * block_rows, cache.strides[0] = cache.strides[1] * blocks;
  }
  CompactKv args = {caches[0],
                    caches[1],
                    rows(path, width),
                    {length.data(), 1},
                    {prefix_len.data(), 1},
                    {paged ? table.data() : nullptr, columns, 1},
                    batch,
                    width,
                    columns,
                    layers,
                    blocks,
                    block_rows,
                    heads,
                    dim,
                    4};
  cpu::compact_kv(args, num_threads);
}

void run(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    bool large = round % 100 == 0;  // enough work for a second thread
    int64_t batch = large ? 200 : between(0, 4);
    int64_t columns = between(1, 150), max_nodes = between(1, 140);
    int num_threads = int(between(1, 3));
    cpu::level_cap = int(between(cpu::kPortable, cpu::kAvx512));
    check_select_leaves(batch, columns, between(1, columns), num_threads);
    check_enter_level(batch, between(1, 8), between(1, 8), num_threads);
    OwnedTree tree = check_rerank(batch, columns - 1, max_nodes, num_threads);
    check_verify(tree, batch, max_nodes, num_threads);
    if (!large) check_accept(tree, batch, max_nodes, num_threads);
    for (int32_t& parent : tree.parents) parent = int32_t(between(-2, max_nodes + 1));
    for (int32_t& count : tree.num_nodes) count = int32_t(between(-2, max_nodes + 2));
    check_verify(tree, batch, max_nodes, num_threads);
    check_expand(batch, columns * (large ? 50 : 1), num_threads);
    check_tree_attention(num_threads);
    check_compact_kv(num_threads);
  }
}

}  // namespace

// How many threads call the operators at once. OpenMP's own are unknown to TSan: that build has
// none.
int main(int argc, char** argv) {
  const int rounds = 2000, threads = argc > 1 ? std::atoi(argv[1]) : 1;
  std::vector<std::thread> callers;
  for (int i = 0; i < threads; ++i)
    callers.emplace_back([=] {
      random_bits.seed(7 + i);
      run(rounds / threads);
    });
  for (std::thread& caller : callers) caller.join();
  std::printf("sanitize: %d rounds, %d calling thread(s), clean\n", rounds, threads);
}
