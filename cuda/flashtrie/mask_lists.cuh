// Token masks on a GPU: what a state allows, from one 32-byte record a node.
//
// A record holds the first six entries of the node's list, which is all of it for 97 nodes of 100; longer lists lie in
// `entries`, and the longest have a dense row. Records take 32 bytes a node where the CPU's arrays take 4 and the
// entries; in exchange a mask is known after two dependent reads, the state and one sector.
//
//   question                              dependent reads
//   allowed tokens, up to six             2  state, record
//   up to 32; dense                       3  and the entries, or the words of the tile
//   where does a token lead?              2  the same record; more by the length of the list, or over a long way
#pragma once
#include "masks.cuh"
#include "token_kernels.cuh"

namespace flashtrie {

constexpr uint32_t kRecordEntries = 6;
constexpr uint32_t kLongList = 256;

struct alignas(32) MaskRecord {
  uint32_t first;  // of the node's entries, with the terminal bit
  uint32_t count;
  uint32_t entries[kRecordEntries];  // all of them, if there are no more; else the first word is the dense row, or kNothing
};
static_assert(sizeof(MaskRecord) == 32, "one sector");

struct MaskLists {
  const MaskRecord* records;  // num_nodes + 1: the last is the state after an end-of-sequence token, empty
  const uint32_t* entries;    // token << hop_bits | hop, as in MaskView
  const uint32_t* far_entries;
  const uint32_t* far_targets;
  EndTokens ends;
  DenseRows dense;
  uint32_t num_nodes;
  uint32_t num_far;
  uint32_t vocab_size;
  int32_t hop_bits;

  static constexpr int kLanes = 1;
  FT_DEVICE uint32_t ended() const { return num_nodes; }
  FT_DEVICE uint32_t known(uint32_t state) const { return state < num_nodes ? state : num_nodes; }

  template <typename Tile>
  FT_DEVICE Share mark(uint32_t state, const Tile& tile, uint32_t* marks) const {
    if (state == 0 && dense.root_row != kNothing) return mark_dense(tile, dense, dense.root_row, marks);
    const uint32_t lane = simt::lane(), own_end = ends.own();
    const uint32_t* record = reinterpret_cast<const uint32_t*>(records + known(state));
    const uint32_t word = record[lane % 8];  // lane l of the first eight: word l
    const uint32_t here = simt::shuffle(word, 0), count = simt::shuffle(word, 1), dense_row = simt::shuffle(word, 2);
    const uint32_t first = here & ~kTerminalBit;
    const auto token = [this](uint32_t entry) { return entries[entry] >> hop_bits; };
    uint32_t own = kNothing;
    if (count <= kRecordEntries) {
      if (lane >= 2 && lane < 2 + count) own = word >> hop_bits;
    } else if (dense_row != kNothing) {
      return mark_dense(tile, dense, dense_row, marks);
    } else if (lane < count && count <= 32) {
      own = token(first + lane);
    }
    const bool with_ends = (here & kTerminalBit) != 0 || (ends.after_end && state >= num_nodes);
    return mark_list(tile, own, first, first + count, token, ends, with_ends, own_end, marks);
  }

  FT_DEVICE bool is_long(uint32_t state) const {
    return state == 0 || simt::load_quad(records + known(state)).y > kLongList;
  }

  // The state after a token, or kRejected; by a thread.
  FT_DEVICE uint32_t advance(uint32_t state, int64_t token) const {
    if (token < 0 || token >= vocab_size) return kRejected;
    const uint32_t node = known(state), wanted = static_cast<uint32_t>(token);
    const simt::Quad* record = reinterpret_cast<const simt::Quad*>(records + node);
    const simt::Quad head = simt::load_quad(record), tail = simt::load_quad(record + 1);
    const uint32_t own[kRecordEntries] = {head.z, head.w, tail.x, tail.y, tail.z, tail.w};
    const uint32_t first = head.x & ~kTerminalBit, count = head.y;
    if (count > kRecordEntries) {
      const uint32_t at = lower_bound(entries, first, first + count, wanted << hop_bits);
      if (at < first + count && entries[at] >> hop_bits == wanted) return target(node, at, entries[at]);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kRecordEntries; ++i)
        if (i < count && own[i] >> hop_bits == wanted) return target(node, first + i, own[i]);
    }
    if ((head.x & kTerminalBit) == 0) return kRejected;
#pragma unroll 1
    for (uint32_t i = 0; i < ends.count; ++i)
      if (ends.tokens[i] == wanted) return num_nodes;
    return kRejected;
  }

  FT_DEVICE uint32_t target(uint32_t node, uint32_t at, uint32_t entry) const {
    const uint32_t hop = entry & far_hop(hop_bits);
    return hop != far_hop(hop_bits) ? node + hop : far_targets[lower_bound(far_entries, 0, num_far, at)];
  }
};

struct MaskRecordParams {
  MaskRecord* records;          // num_nodes + 1
  const uint16_t* rows;         // as in MaskView, no node single
  const uint32_t* entries;
  const uint32_t* dense_nodes;  // num_dense, ascending
  uint32_t num_nodes;
  uint32_t num_dense;
};

// A thread a record.
FT_DEVICE void make_record(const MaskRecordParams& p) {
  const uint32_t node = simt::block() * simt::num_threads() + simt::thread();
  if (node > p.num_nodes) return;
  MaskRecord record = {0, 0, {0, 0, 0, 0, 0, 0}};
  if (node < p.num_nodes) {
    const EntryRange range = entry_range(p.rows, node);
    record.first = range.first | (range.terminal ? kTerminalBit : 0);
    record.count = range.count();
    if (record.count > kRecordEntries) {
      const uint32_t at = lower_bound(p.dense_nodes, 0, p.num_dense, node);
      record.entries[0] = at < p.num_dense && p.dense_nodes[at] == node ? at : kNothing;
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kRecordEntries; ++i)
        if (i < record.count) record.entries[i] = p.entries[range.first + i];
    }
  }
  p.records[node] = record;
}

}  // namespace flashtrie
