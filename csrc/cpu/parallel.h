// Rows over threads. The threads are those of the OpenMP runtime that torch has loaded.
#pragma once
#include <algorithm>
#include <cstdint>

namespace eagle2::cpu {

// Waking a thread costs microseconds: each is given at least this much work.
constexpr int64_t kElementsPerThread = 8192;

// body(first, last) takes a run of rows, so that it can keep scratch memory between them.
template <typename Body>
void for_row_ranges(int64_t rows, int64_t elements_per_row, int num_threads, const Body& body) {
  int64_t worthwhile = rows * elements_per_row / kElementsPerThread;
  int64_t parts = std::max<int64_t>(1, std::min<int64_t>({rows, worthwhile, num_threads}));
  if (parts == 1) return body(int64_t(0), rows);
#pragma omp parallel for num_threads(int(parts)) schedule(static, 1)
  for (int64_t part = 0; part < parts; ++part) body(rows * part / parts, rows * (part + 1) / parts);
}

}  // namespace eagle2::cpu
