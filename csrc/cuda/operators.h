// The CUDA form: each call puts one kernel on a stream and returns. Arguments as in the C++ form,
// addresses are of the device. Throws what CUDA says where a launch fails.
#pragma once
#include <cstdint>

#include "cache.h"
#include "rows.h"

namespace eagle2::cuda {

struct Stream {
  int device;
  uintptr_t handle;  // cudaStream_t
};

void select_leaves(Matrix<const float> scores, int64_t batch, int64_t columns, int64_t k,
                   int32_t* index, Stream stream);

// Integers of scratch memory per row; 0 while a row's candidates fit into shared memory.
int64_t rerank_scratch(int64_t columns);

// scratch: [B, rerank_scratch(C)].
void rerank(const CandidateRows& candidates, Vector<const int64_t> root_tokens,
            Vector<const int32_t> num_nodes, int64_t max_nodes, const TreeRows& tree,
            int32_t* scratch, Stream stream);

void verify(const VerifyRows& rows, int64_t depth, int32_t* path, int32_t* accept_length,
            int64_t* bonus_token, Stream stream);

void compact_kv(const CompactKv& args, Stream stream);

}  // namespace eagle2::cuda
