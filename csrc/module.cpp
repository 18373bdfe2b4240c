// eagle2_kernels._C: tensors arrive as tuples (address, *strides), outputs as addresses of
// contiguous memory. No checks: eagle2_kernels/ops.py has made them.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <tuple>

#include "cpu/operators.h"

namespace py = pybind11;
using namespace eagle2;

namespace {

using VectorArg = std::tuple<uintptr_t, int64_t>;
using MatrixArg = std::tuple<uintptr_t, int64_t, int64_t>;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <typename T>
Vector<const T> vector(const VectorArg& arg) {
  return {pointer<const T>(std::get<0>(arg)), std::get<1>(arg)};
}

template <typename T>
Matrix<const T> matrix(const MatrixArg& arg) {
  return {pointer<const T>(std::get<0>(arg)), std::get<1>(arg), std::get<2>(arg)};
}

void select_leaves(MatrixArg scores, int64_t batch, int64_t columns, int64_t k, uintptr_t index,
                   int num_threads) {
  cpu::select_leaves(matrix<float>(scores), batch, columns, k, pointer<int32_t>(index),
                     num_threads);
}

void rerank(MatrixArg tokens, MatrixArg scores, MatrixArg parents, VectorArg root_tokens,
            VectorArg num_nodes, int64_t batch, int64_t columns, int64_t max_nodes,
            uintptr_t tree_tokens, uintptr_t tree_parents, uintptr_t depths, uintptr_t ancestors,
            uintptr_t tree_scores, uintptr_t tree_num_nodes, int num_threads) {
  cpu::CandidateRows candidates = {matrix<int64_t>(tokens), matrix<float>(scores),
                                   matrix<int32_t>(parents), batch, columns};
  cpu::TreeRows tree = {pointer<int64_t>(tree_tokens), pointer<int32_t>(tree_parents),
                        pointer<int32_t>(depths),      pointer<uint64_t>(ancestors),
                        pointer<float>(tree_scores),   pointer<int32_t>(tree_num_nodes)};
  cpu::rerank(candidates, vector<int64_t>(root_tokens), vector<int32_t>(num_nodes), max_nodes, tree,
              num_threads);
}

void verify(MatrixArg tokens, MatrixArg parents, VectorArg num_nodes, MatrixArg target_tokens,
            int64_t batch, int64_t columns, int64_t depth, uintptr_t path, uintptr_t accept_length,
            uintptr_t bonus_token, int num_threads) {
  cpu::VerifyRows rows = {matrix<int64_t>(tokens),
                          matrix<int32_t>(parents),
                          vector<int32_t>(num_nodes),
                          matrix<int64_t>(target_tokens),
                          batch,
                          columns};
  cpu::verify(rows, depth, pointer<int32_t>(path), pointer<int32_t>(accept_length),
              pointer<int64_t>(bonus_token), num_threads);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("select_leaves", &select_leaves, unlocked());
  module.def("rerank", &rerank, unlocked());
  module.def("verify", &verify, unlocked());
}
