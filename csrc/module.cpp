// eagle2_kernels._C: tensors arrive as in arguments.h, outputs as addresses of contiguous memory.
// No checks: eagle2_kernels/ops.py has made them.
#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>

#include "arguments.h"
#include "cpu/operators.h"
#include "cpu/simd.h"

namespace py = pybind11;
using namespace eagle2;

namespace {

void select_leaves(MatrixArg scores, int64_t batch, int64_t columns, int64_t k, uintptr_t index,
                   int num_threads) {
  cpu::select_leaves(matrix<float>(scores), batch, columns, k, pointer<int32_t>(index),
                     num_threads);
}

void enter_level(std::array<MatrixArg, 3> all, int64_t begin, std::array<CubeArg, 3> level,
                 MatrixArg parents, std::array<int64_t, 4> sizes, int64_t first_slot, int64_t k,
                 VectorArg num_nodes, std::array<uintptr_t, 6> leaves, int num_threads) {
  auto written = [](auto view) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(view.data)>>;
    return Matrix<T>{const_cast<T*>(view.data), view.row_stride, view.column_stride};
  };
  cpu::LevelRows rows = {written(matrix<int64_t>(all[0])),
                         written(matrix<float>(all[1])),
                         written(matrix<int32_t>(all[2])),
                         begin,
                         cube<int64_t>(level[0]),
                         cube<float>(level[1]),
                         matrix<int32_t>(parents),
                         cube<uint64_t>(level[2]),
                         vector<int32_t>(num_nodes),
                         sizes[0],
                         sizes[1],
                         sizes[2],
                         sizes[3],
                         first_slot,
                         k};
  cpu::enter_level(
      rows,
      {pointer<int64_t>(leaves[0]), pointer<float>(leaves[1]), pointer<int32_t>(leaves[2]),
       pointer<int64_t>(leaves[3]), pointer<uint64_t>(leaves[4]), pointer<int32_t>(leaves[5])},
      num_threads);
}

void rerank(MatrixArg tokens, MatrixArg scores, MatrixArg parents, VectorArg root_tokens,
            VectorArg num_nodes, int64_t batch, int64_t columns, int64_t max_nodes,
            uintptr_t tree_tokens, uintptr_t tree_parents, uintptr_t depths, uintptr_t ancestors,
            uintptr_t tree_scores, uintptr_t tree_num_nodes, int num_threads) {
  CandidateRows candidates = {matrix<int64_t>(tokens), matrix<float>(scores),
                              matrix<int32_t>(parents), batch, columns};
  TreeRows tree = {pointer<int64_t>(tree_tokens), pointer<int32_t>(tree_parents),
                   pointer<int32_t>(depths),      pointer<uint64_t>(ancestors),
                   pointer<float>(tree_scores),   pointer<int32_t>(tree_num_nodes)};
  cpu::rerank(candidates, vector<int64_t>(root_tokens), vector<int32_t>(num_nodes), max_nodes, tree,
              num_threads);
}

void verify(MatrixArg tokens, MatrixArg parents, VectorArg num_nodes, MatrixArg target_tokens,
            int64_t batch, int64_t columns, int64_t depth, uintptr_t path, uintptr_t accept_length,
            uintptr_t bonus_token, int num_threads) {
  VerifyRows rows = {matrix<int64_t>(tokens),
                     matrix<int32_t>(parents),
                     vector<int32_t>(num_nodes),
                     matrix<int64_t>(target_tokens),
                     batch,
                     columns};
  cpu::verify(rows, depth, pointer<int32_t>(path), pointer<int32_t>(accept_length),
              pointer<int64_t>(bonus_token), num_threads);
}

using Sizes3 = std::array<int64_t, 3>;

void expand(uintptr_t logits, int dtype, Sizes3 sizes, Sizes3 strides, MatrixArg leaf_scores,
            int64_t k, VectorArg draft_to_target, uintptr_t tokens, uintptr_t scores,
            int num_threads) {
  cpu::ExpandRows rows = {pointer<void>(logits),
                          cpu::Dtype(dtype),
                          {strides[0], strides[1], strides[2]},
                          sizes[0],
                          sizes[1],
                          sizes[2],
                          k,
                          matrix<float>(leaf_scores),
                          vector<int64_t>(draft_to_target)};
  cpu::expand(rows, pointer<int64_t>(tokens), pointer<float>(scores), num_threads);
}

void compact_kv(uintptr_t k_cache, uintptr_t v_cache, int64_t element_size, Sizes5 sizes,
                Sizes5 k_strides, Sizes5 v_strides, MatrixArg path, int64_t batch,
                int64_t path_columns, VectorArg accept_length, VectorArg prefix_len,
                MatrixArg block_table, int64_t table_columns, int num_threads) {
  CompactKv args = {cache_bytes(k_cache, k_strides, element_size),
                    cache_bytes(v_cache, v_strides, element_size),
                    matrix<int32_t>(path),
                    vector<int32_t>(accept_length),
                    vector<int32_t>(prefix_len),
                    matrix<int32_t>(block_table),
                    batch,
                    path_columns,
                    table_columns,
                    sizes[0],
                    sizes[1],
                    sizes[2],
                    sizes[3],
                    sizes[4],
                    element_size};
  cpu::compact_kv(args, num_threads);
}

using Sizes4 = std::array<int64_t, 4>;

void tree_attention(uintptr_t q, uintptr_t k_cache, uintptr_t v_cache, uintptr_t out, int dtype,
                    Sizes4 q_sizes, Sizes4 q_strides, Sizes4 cache_sizes, Sizes4 k_strides,
                    Sizes4 v_strides, uintptr_t prefix_len, uintptr_t num_nodes,
                    uintptr_t ancestors, int64_t words, uintptr_t block_table,
                    int64_t table_columns, float scale, int64_t window, int num_threads) {
  cpu::Attention args = {};
  args.q = pointer<void>(q), args.k = pointer<void>(k_cache), args.v = pointer<void>(v_cache);
  args.out = pointer<void>(out), args.dtype = cpu::Dtype(dtype);
  std::copy(q_strides.begin(), q_strides.end(), args.q_strides);
  std::copy(k_strides.begin(), k_strides.end(), args.k_strides);
  std::copy(v_strides.begin(), v_strides.end(), args.v_strides);
  args.batch = q_sizes[0], args.nodes = q_sizes[1], args.heads = q_sizes[2], args.dim = q_sizes[3];
  args.blocks = cache_sizes[0], args.block_rows = cache_sizes[1], args.kv_heads = cache_sizes[2];
  args.prefix_len = pointer<int32_t>(prefix_len), args.num_nodes = pointer<int32_t>(num_nodes);
  args.ancestors = pointer<uint64_t>(ancestors), args.words = words;
  args.block_table = pointer<int32_t>(block_table), args.table_columns = table_columns;
  args.scale = scale, args.window = window;
  cpu::tree_attention(args, num_threads);
}

using SampleArg = std::tuple<uintptr_t, int, std::tuple<int64_t, int64_t, int64_t>,
                             std::tuple<int64_t, int64_t, int64_t>, VectorArg, VectorArg, VectorArg,
                             VectorArg, VectorArg, MatrixArg>;

cpu::SampleRows sample_rows(const SampleArg& arg) {
  auto [logits, dtype, sizes, strides, temperature, top_k, top_p, min_p, seed, positions] = arg;
  auto [batch, columns, vocab] = sizes;
  auto [row_stride, node_stride, id_stride] = strides;
  return {pointer<void>(logits),
          cpu::Dtype(dtype),
          {row_stride, node_stride, id_stride},
          batch,
          columns,
          vocab,
          vector<float>(temperature),
          vector<int32_t>(top_k),
          vector<float>(top_p),
          vector<float>(min_p),
          vector<int64_t>(seed),
          matrix<int64_t>(positions)};
}

void sample(const SampleArg& arg, uintptr_t tokens, int num_threads) {
  cpu::sample(sample_rows(arg), pointer<int64_t>(tokens), num_threads);
}

void accept(MatrixArg tokens, MatrixArg parents, VectorArg num_nodes, const SampleArg& arg,
            int64_t depth, uintptr_t path, uintptr_t accept_length, uintptr_t bonus_token,
            uintptr_t path_tokens, int num_threads) {
  cpu::SampleRows rows = sample_rows(arg);
  VerifyRows tree = {matrix<int64_t>(tokens),
                     matrix<int32_t>(parents),
                     vector<int32_t>(num_nodes),
                     {},
                     rows.batch,
                     rows.columns};
  cpu::accept(tree, rows, depth, pointer<int32_t>(path), pointer<int32_t>(accept_length),
              pointer<int64_t>(bonus_token), pointer<int64_t>(path_tokens), num_threads);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("select_leaves", &select_leaves, unlocked());
  module.def("enter_level", &enter_level, unlocked());
  module.def("rerank", &rerank, unlocked());
  module.def("verify", &verify, unlocked());
  module.def("sample", &sample, unlocked());
  module.def("accept", &accept, unlocked());
  module.def("expand", &expand, unlocked());
  module.def("tree_attention", &tree_attention, unlocked());
  module.def("compact_kv", &compact_kv, unlocked());
  module.def("cpu_level", &cpu::cpu_level);
  module.def("cap_level", [](int level) { cpu::level_cap = level; });
}
