// Host and device: the caches of all layers as bytes, and which rows an accepted path moves.
#pragma once
#include <cstdint>

#include "view.h"

namespace eagle2 {

struct CacheBytes {
  char* data;          // [layers, B, S, G, E] or [layers, blocks, block rows, G, E]
  int64_t strides[5];  // in bytes
};

struct CompactKv {
  CacheBytes k, v;
  Matrix<const int32_t> path;                       // [B, path columns]
  Vector<const int32_t> accept_length, prefix_len;  // [B]
  Matrix<const int32_t> block_table;                // [B, table columns] or null
  int64_t batch, path_columns, table_columns;
  int64_t layers, blocks, block_rows, kv_heads, dim, element_size;

  EAGLE2_HD int64_t capacity() const {
    return block_table.data ? table_columns * block_rows : block_rows;
  }

  EAGLE2_HD int64_t steps(int64_t batch_row) const {
    int64_t accepted = accept_length[batch_row];
    return accepted < path_columns ? accepted : path_columns - 1;
  }
};

// Null where the slot lies outside the cache.
EAGLE2_HD char* find_row(const CompactKv& args, const CacheBytes& cache, int64_t layer,
                         int64_t batch_row, int64_t slot) {
  if (slot < 0 || slot >= args.capacity()) return nullptr;
  int64_t block = batch_row;
  if (args.block_table.data) {
    uint32_t rows = uint32_t(args.block_rows), at = uint32_t(slot);  // 64-bit division is slow
    block = args.block_table[batch_row][at / rows];
    if (block < 0 || block >= args.blocks) return nullptr;
    slot = at % rows;
  }
  return cache.data + layer * cache.strides[0] + block * cache.strides[1] + slot * cache.strides[2];
}

struct RowMove {
  const char* from;  // null: nothing moves
  char* to;
};

EAGLE2_HD RowMove find_move(const CompactKv& args, const CacheBytes& cache, int64_t layer,
                            int64_t batch_row, int64_t step) {
  int64_t node = args.path[batch_row][step], prefix = args.prefix_len[batch_row];
  if (node < 0 || node == step) return {nullptr, nullptr};
  char* from = find_row(args, cache, layer, batch_row, prefix + node);
  char* to = find_row(args, cache, layer, batch_row, prefix + step);
  return {to ? from : nullptr, to};
}

}  // namespace eagle2
