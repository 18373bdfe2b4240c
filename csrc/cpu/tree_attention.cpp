#include "cpu/tree_attention.h"

#include <algorithm>
#include <atomic>
#include <utility>

#define EAGLE2_KERNEL "cpu/tree_attention_kernel.h"
#include "cpu/every_level.h"

namespace eagle2::cpu {
namespace {

// Multiplications that are worth a second thread: waking it costs microseconds, more where it has
// to share its core.
constexpr int64_t kWorkPerThread = int64_t(1) << 21;

// The tail slots that a node sees, by ascending depth.
std::vector<int64_t> tail_of(const Attention& a, int64_t batch_row, int64_t node) {
  int64_t limit = std::min<int64_t>({a.num_nodes[batch_row], 64 * a.words, a.capacity()});
  std::vector<int64_t> tail;
  for (int64_t word = 0; word < a.words; ++word) {
    uint64_t bits = a.ancestors[(batch_row * a.nodes + node) * a.words + word];
    for (; bits; bits &= bits - 1) {
      int64_t slot = word * 64 + __builtin_ctzll(bits);
      if (slot < limit) tail.push_back(slot);
    }
  }
  return tail;
}

MaskedKeys masked_keys(const Attention& a, int64_t batch_row) {
  int64_t group = a.heads / a.kv_heads, rows = padded_rows(a.nodes * group);
  int64_t prefix = std::max<int64_t>(a.prefix_len[batch_row], 0);
  int64_t committed = std::min(prefix, a.capacity());
  MaskedKeys keys;
  keys.live.resize(a.nodes);
  std::vector<int64_t> starts(a.nodes, committed);  // first prefix slot that a node sees
  std::vector<std::pair<int64_t, int64_t>> seen;    // tail slot, node
  keys.first = committed, keys.last = committed;
  int64_t latest = 0;
  for (int64_t node = 0; node < a.nodes; ++node) {
    std::vector<int64_t> tail = tail_of(a, batch_row, node);
    int64_t length = int64_t(tail.size());
    keys.live[node] = length > 0;
    if (!length) continue;
    starts[node] = std::min(std::max<int64_t>(prefix + length - a.window, 0), committed);
    keys.first = std::min(keys.first, starts[node]);
    latest = std::max(latest, starts[node]);
    for (int64_t i = std::max<int64_t>(length - a.window, 0); i < length; ++i)
      seen.emplace_back(tail[i], node);
  }
  auto add = [&](int64_t slot) {
    keys.slots.push_back(slot);
    keys.seen.resize(keys.seen.size() + rows, 0);
  };
  auto show = [&](int64_t node) {
    uint32_t* line = keys.seen.data() + (keys.slots.size() - 1) * rows + node * group;
    std::fill(line, line + group, ~uint32_t(0));
  };
  for (int64_t slot = keys.first; slot < latest; ++slot) {
    add(slot);
    for (int64_t node = 0; node < a.nodes; ++node)
      if (keys.live[node] && starts[node] <= slot) show(node);
  }
  bool any_live = std::find(keys.live.begin(), keys.live.end(), true) != keys.live.end();
  keys.first = any_live ? latest : committed;
  std::sort(seen.begin(), seen.end());
  int64_t previous = -1;
  for (auto [tail, node] : seen) {
    if (tail != previous) add(std::min(prefix + tail, a.capacity() - 1));
    show(node);
    previous = tail;
  }
  return keys;
}

// Parts of the prefix per head: enough to give every thread the same.
int64_t num_parts(int64_t heads, int64_t longest, int num_threads) {
  if (num_threads == 1 || heads % num_threads == 0 || heads >= 4 * num_threads) return 1;
  return std::max<int64_t>(1, std::min<int64_t>(num_threads, longest / 64));
}

}  // namespace

void tree_attention(const Attention& a, int num_threads) {
  int64_t heads = a.batch * a.kv_heads, rows = a.nodes * (a.heads / a.kv_heads);
  if (heads == 0 || rows == 0) return;
  std::vector<MaskedKeys> keys(a.batch);
  int64_t work = 0, longest = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    keys[b] = masked_keys(a, b);
    int64_t prefix = keys[b].last - keys[b].first;
    longest = std::max(longest, prefix);
    work += (prefix + int64_t(keys[b].slots.size())) * rows * a.dim * a.kv_heads * 2;
  }
  int threads = int(std::max<int64_t>(1, std::min<int64_t>(num_threads, work / kWorkPerThread)));
  int64_t parts = num_parts(heads, longest, threads), size = rows * (a.dim + 2);
  static thread_local std::vector<float> memory;
  memory.resize(heads * parts * size);
  float* const results = memory.data();

  auto unit = [&](int64_t head, int64_t part) {
    const MaskedKeys& row_keys = keys[head / a.kv_heads];
    int64_t prefix = row_keys.last - row_keys.first;
    float* mixed = results + (head * parts + part) * size;
    return AttentionUnit{&a,
                         &row_keys,
                         head / a.kv_heads,
                         head % a.kv_heads,
                         row_keys.first + prefix * part / parts,
                         row_keys.first + prefix * (part + 1) / parts,
                         part + 1 == parts,
                         {mixed, mixed + rows * a.dim, mixed + rows * (a.dim + 1)}};
  };
  auto attend = EAGLE2_AT_LEVEL(attend);
  auto merge = EAGLE2_AT_LEVEL(merge);
  std::vector<std::atomic<int64_t>> finished(heads);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t i = 0; i < heads * parts; ++i) {
    int64_t head = i / parts;
    attend(unit(head, i % parts));
    // whoever completes a head merges it: a second barrier could cost a time slice
    if (finished[head].fetch_add(1, std::memory_order_acq_rel) + 1 < parts) continue;
    std::vector<Partial> partials;
    for (int64_t part = 0; part < parts; ++part) partials.push_back(unit(head, part).out);
    merge(unit(head, 0), partials.data(), int(parts));
  }
}

}  // namespace eagle2::cpu
