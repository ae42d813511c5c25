// The byte trie with token masks: the arrays that the CPU engine and the kernels both read.
//
// Nodes are numbered in preorder with ascending bytes, root 0; `num_nodes` itself is the state after an
// end-of-sequence token, in which nothing is allowed. A node's allowed tokens are one ascending run of
// entries, 32 bits each: the token id above, and below it how far down the numbering the node lies that
// the token leads to. A distance that does not fit is looked up in the far table instead.
//
// Five nodes of six are single: one byte must follow. The tokens that spell just that byte (one, or in SentencePiece
// vocabularies two) lead to the next node and are no entries: the byte in the node's row says which they are.
//
//   question                        dependent reads
//   terminal? how many allowed?     1  the node's row, 6 bytes
//   allowed tokens                  2  the row, then the run (1 to 4 entries as a rule: one sector)
//   where does a token lead?        2  the same run; 3 + log2(num_far) for the far few
#pragma once
#include "bits.cuh"

namespace flashtrie {

// A row is three halfwords. The first two, as one word: the node's first entry, and two bits. The third: the byte that
// must follow a single node (0 for others), and from bit 8 on the number of entries; kManyEntries: as many as there
// are up to the next row's.
constexpr uint32_t kRowHalves = 3;
constexpr uint32_t kTerminalBit = 0x80000000u;  // a member of the set ends at this node
constexpr uint32_t kSingleBit = 0x40000000u;    // none does, and it has one child
constexpr uint32_t kEntryBits = 0x3fffffffu;
constexpr uint32_t kManyEntries = 255;
constexpr uint32_t kRejected = 0xffffffffu;     // what an advance answers to a token that is not allowed

// The tokens that spell one byte each: those of byte b are tokens[begins[b], begins[b + 1]), ascending.
struct ByteTokens {
  const uint32_t* begins;  // 257
  const uint32_t* tokens;
};

// Pointers and counts only; the arrays belong to whoever opened the index.
struct MaskView {
  const uint16_t* rows;         // num_nodes + 2 rows; the last two are empty and end the runs
  const uint32_t* entries;      // token << hop_bits | hop; hop = target - node, all ones where that is too far
  const uint32_t* far_entries;  // num_far, ascending: positions of the entries with such a hop
  const uint32_t* far_targets;  // num_far: the nodes they lead to
  const uint32_t* eos;          // num_eos, ascending: the end-of-sequence ids
  ByteTokens bytes;
  uint32_t num_nodes;
  uint32_t num_far;
  uint32_t num_eos;
  uint32_t vocab_size;          // logits a row: what the model puts out, often more than the tokenizer knows
  int32_t hop_bits;             // 8 to 31
};

struct EntryRange {
  uint32_t first, last;  // half-open, in entries
  bool terminal, single;
  uint8_t byte;  // of a single node

  FT_HD uint32_t count() const { return last - first; }
};

FT_HD uint32_t row_word(const uint16_t* rows, uint32_t node) {
  const uint16_t* const row = rows + static_cast<uint64_t>(node) * kRowHalves;
  return row[0] | static_cast<uint32_t>(row[1]) << 16;
}

FT_HD EntryRange entry_range(const uint16_t* rows, uint32_t node) {
  const uint32_t word = row_word(rows, node), rest = rows[static_cast<uint64_t>(node) * kRowHalves + 2];
  const uint32_t first = word & kEntryBits, count = rest >> 8;
  const uint32_t last = count < kManyEntries ? first + count : row_word(rows, node + 1) & kEntryBits;
  return {first, last, (word & kTerminalBit) != 0, (word & kSingleBit) != 0, static_cast<uint8_t>(rest)};
}

FT_HD void put_row(uint16_t* rows, uint32_t node, uint32_t word, uint32_t num_entries, uint8_t byte) {
  uint16_t* const row = rows + static_cast<uint64_t>(node) * kRowHalves;
  row[0] = static_cast<uint16_t>(word);
  row[1] = static_cast<uint16_t>(word >> 16);
  row[2] = static_cast<uint16_t>((num_entries < kManyEntries ? num_entries : kManyEntries) << 8 | byte);
}

FT_HD EntryRange entry_range(const MaskView& masks, uint32_t node) { return entry_range(masks.rows, node); }

// The tokens of a single node that are no entries, as a half-open range of masks.bytes.tokens; empty for other nodes.
struct ByteRange {
  uint32_t first, last;
  FT_HD uint32_t count() const { return last - first; }
};

FT_HD ByteRange byte_range(const MaskView& masks, const EntryRange& range) {
  if (!range.single) return {0, 0};
  return {masks.bytes.begins[range.byte], masks.bytes.begins[range.byte + 1]};
}

// First position of values[first, last) that is not below `wanted`.
FT_HD uint32_t lower_bound(const uint32_t* values, uint32_t first, uint32_t last, uint32_t wanted) {
  while (first < last) {
    const uint32_t middle = first + ((last - first) >> 1);
    if (values[middle] < wanted)
      first = middle + 1;
    else
      last = middle;
  }
  return first;
}

FT_HD uint32_t entry_token(const MaskView& masks, uint32_t entry) { return masks.entries[entry] >> masks.hop_bits; }

FT_HD uint32_t far_hop(int32_t hop_bits) { return (uint32_t(1) << hop_bits) - 1; }

FT_HD uint32_t entry_target(const MaskView& masks, uint32_t node, uint32_t entry) {
  const uint32_t hop = masks.entries[entry] & far_hop(masks.hop_bits);
  if (hop != far_hop(masks.hop_bits)) return node + hop;
  return masks.far_targets[lower_bound(masks.far_entries, 0, masks.num_far, entry)];
}

FT_HD bool is_eos(const MaskView& masks, uint32_t token) {
  for (uint32_t i = 0; i < masks.num_eos; ++i)
    if (masks.eos[i] == token) return true;
  return false;
}

// The state after `token`, or kRejected where the token is not allowed. `state` is at most num_nodes.
FT_HD uint32_t advance(const MaskView& masks, uint32_t state, uint32_t token) {
  if (token >= masks.vocab_size) return kRejected;
  const EntryRange range = entry_range(masks, state);
  const uint32_t entry = lower_bound(masks.entries, range.first, range.last, token << masks.hop_bits);
  if (entry < range.last && entry_token(masks, entry) == token) return entry_target(masks, state, entry);
  const ByteRange bytes = byte_range(masks, range);
  for (uint32_t i = bytes.first; i < bytes.last; ++i)
    if (masks.bytes.tokens[i] == token) return state + 1;
  return range.terminal && is_eos(masks, token) ? masks.num_nodes : kRejected;
}

}  // namespace flashtrie
