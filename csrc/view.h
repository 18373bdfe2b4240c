// Host and device: a tensor as a pointer and its strides, counted in elements.
#pragma once
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define EAGLE2_HD __host__ __device__ inline
#else
#define EAGLE2_HD inline
#endif

namespace eagle2 {

template <typename T>
struct Vector {
  T* data;
  int64_t stride;

  EAGLE2_HD T& operator[](int64_t i) const { return data[i * stride]; }
  EAGLE2_HD T& operator()(int64_t i) const { return (*this)[i]; }
};

template <typename T>
struct Matrix {
  T* data;
  int64_t row_stride, column_stride;

  EAGLE2_HD Vector<T> operator[](int64_t row) const {
    return {data + row * row_stride, column_stride};
  }
};

template <typename T>
struct Cube {
  T* data;
  int64_t strides[3];

  EAGLE2_HD Matrix<T> operator[](int64_t row) const {
    return {data + row * strides[0], strides[1], strides[2]};
  }
};

}  // namespace eagle2
