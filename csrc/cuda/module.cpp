// eagle2_kernels._cuda: tensors arrive as in arguments.h, outputs as addresses of contiguous memory
// of the device. No checks: eagle2_kernels/ops.py has made them. Loads without a GPU.
#include <cuda_runtime.h>

#include "arguments.h"
#include "cuda/operators.h"

#define EAGLE2_QUOTE_AS_IS(text) #text
#define EAGLE2_QUOTE(macro) EAGLE2_QUOTE_AS_IS(macro)

namespace py = pybind11;
using namespace eagle2;

namespace {

void select_leaves(MatrixArg scores, int64_t batch, int64_t columns, int64_t k, uintptr_t index,
                   int device, uintptr_t stream) {
  cuda::select_leaves(matrix<float>(scores), batch, columns, k, pointer<int32_t>(index),
                      {device, stream});
}

void rerank(MatrixArg tokens, MatrixArg scores, MatrixArg parents, VectorArg root_tokens,
            VectorArg num_nodes, int64_t batch, int64_t columns, int64_t max_nodes,
            uintptr_t tree_tokens, uintptr_t tree_parents, uintptr_t depths, uintptr_t ancestors,
            uintptr_t tree_scores, uintptr_t tree_num_nodes, uintptr_t scratch, int device,
            uintptr_t stream) {
  CandidateRows candidates = {matrix<int64_t>(tokens), matrix<float>(scores),
                              matrix<int32_t>(parents), batch, columns};
  TreeRows tree = {pointer<int64_t>(tree_tokens), pointer<int32_t>(tree_parents),
                   pointer<int32_t>(depths),      pointer<uint64_t>(ancestors),
                   pointer<float>(tree_scores),   pointer<int32_t>(tree_num_nodes)};
  cuda::rerank(candidates, vector<int64_t>(root_tokens), vector<int32_t>(num_nodes), max_nodes,
               tree, pointer<int32_t>(scratch), {device, stream});
}

void verify(MatrixArg tokens, MatrixArg parents, VectorArg num_nodes, MatrixArg target_tokens,
            int64_t batch, int64_t columns, int64_t depth, uintptr_t path, uintptr_t accept_length,
            uintptr_t bonus_token, int device, uintptr_t stream) {
  VerifyRows rows = {matrix<int64_t>(tokens),
                     matrix<int32_t>(parents),
                     vector<int32_t>(num_nodes),
                     matrix<int64_t>(target_tokens),
                     batch,
                     columns};
  cuda::verify(rows, depth, pointer<int32_t>(path), pointer<int32_t>(accept_length),
               pointer<int64_t>(bonus_token), {device, stream});
}

void compact_kv(uintptr_t k_cache, uintptr_t v_cache, int64_t element_size, Sizes5 sizes,
                Sizes5 k_strides, Sizes5 v_strides, MatrixArg path, int64_t batch,
                int64_t path_columns, VectorArg accept_length, VectorArg prefix_len,
                MatrixArg block_table, int64_t table_columns, int device, uintptr_t stream) {
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
  cuda::compact_kv(args, {device, stream});
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("select_leaves", &select_leaves, unlocked());
  module.def("rerank_scratch", &cuda::rerank_scratch);
  module.def("rerank", &rerank, unlocked());
  module.def("verify", &verify, unlocked());
  module.def("compact_kv", &compact_kv, unlocked());
  module.attr("architectures") = EAGLE2_QUOTE(EAGLE2_CUDA_ARCHS);
  module.attr("runtime_version") = CUDART_VERSION;  // 1000 * major + 10 * minor
  // 0 without a driver; makes no context, so a process may still fork
  module.def("driver_version", [] {
    int version = 0;
    cudaDriverGetVersion(&version);
    return version;
  });
}
