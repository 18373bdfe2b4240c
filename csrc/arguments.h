// Tensors as the Python modules pass them: tuples (address, *strides), or addresses alone.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <tuple>

#include "cache.h"
#include "rows.h"

namespace eagle2 {

using VectorArg = std::tuple<uintptr_t, int64_t>;
using MatrixArg = std::tuple<uintptr_t, int64_t, int64_t>;
using CubeArg = std::array<uintptr_t, 4>;
using Sizes5 = std::array<int64_t, 5>;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <typename T>
Vector<const T> vector(const VectorArg& arg) {
  return {pointer<const T>(std::get<0>(arg)), std::get<1>(arg)};
}

template <typename T>
Cube<const T> cube(const CubeArg& arg) {
  return {pointer<const T>(arg[0]), {int64_t(arg[1]), int64_t(arg[2]), int64_t(arg[3])}};
}

template <typename T>
Matrix<const T> matrix(const MatrixArg& arg) {
  return {pointer<const T>(std::get<0>(arg)), std::get<1>(arg), std::get<2>(arg)};
}

inline CacheBytes cache_bytes(uintptr_t address, const Sizes5& strides, int64_t element_size) {
  CacheBytes cache = {pointer<char>(address), {}};
  for (int i = 0; i < 5; ++i) cache.strides[i] = strides[i] * element_size;
  return cache;
}

}  // namespace eagle2
