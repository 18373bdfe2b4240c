#include <cstring>

#include "cpu/operators.h"
#include "cpu/parallel.h"

namespace eagle2::cpu {
namespace {

void move_row(const CompactKv& args, const CacheBytes& cache, const char* from, char* to) {
  int64_t run = args.element_size;  // bytes side by side
  bool whole_head = cache.strides[4] == run;
  if (whole_head) run *= args.dim;
  bool whole_row = whole_head && cache.strides[3] == run;
  if (whole_row) run *= args.kv_heads;
  for (int64_t head = 0; head < (whole_row ? 1 : args.kv_heads); ++head)
    for (int64_t e = 0; e < (whole_head ? 1 : args.dim); ++e) {
      int64_t offset = head * cache.strides[3] + e * cache.strides[4];
      std::memcpy(to + offset, from + offset, run);
    }
}

void compact_layer(const CompactKv& args, int64_t layer, int64_t batch_row) {
  // ascending: a row is written only after what it held has been read
  for (int64_t step = 1; step <= args.steps(batch_row); ++step)
    for (const CacheBytes* cache : {&args.k, &args.v}) {
      RowMove move = find_move(args, *cache, layer, batch_row, step);
      if (move.from) move_row(args, *cache, move.from, move.to);
    }
}

}  // namespace

void compact_kv(const CompactKv& args, int num_threads) {
  int64_t row_bytes = 2 * args.kv_heads * args.dim * args.element_size * args.path_columns;
  for_row_ranges(args.layers * args.batch, row_bytes / 16, num_threads,
                 [&](int64_t first, int64_t last) {
                   for (int64_t i = first; i < last; ++i)
                     compact_layer(args, i / args.batch, i % args.batch);
                 });
}

}  // namespace eagle2::cpu
