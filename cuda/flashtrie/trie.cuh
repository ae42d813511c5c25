// The resident narrow-LOUDS trie: the arrays that the CPU engine and the kernels both walk, and
// the steps over them. A step knows the trie and has no loop over lanes.
//
// Nodes are numbered in level order, root 0. `louds` holds for every node its fan-out in ones, then
// a zero. Node ids have 32 bits, bit positions 64. Every 64 nodes share one 32-byte NodeLine, which
// is one memory sector on a GPU and half a cache line on a CPU:
//
//   question                 dependent reads
//   terminal? leaf?          1  line
//   key id                   1  line
//   child range              2  line, then the louds words at the place it names (or the wide table)
//   label                    1  label_low; +1 line and flags, +1 packed high part where there is one
#pragma once
#include "bits.cuh"

namespace flashtrie {

constexpr int kLineNodes = 64;             // nodes per NodeLine
constexpr uint32_t kNotWide = 0xffffffffu;
constexpr int kWideBits = 512;             // louds bits past which 64 nodes get a row in the wide table
constexpr int kWideStride = kLineNodes + 1;
constexpr uint32_t kNoNode = 0xffffffffu;

// Everything about 64 consecutive nodes that is neither louds nor label.
struct alignas(32) NodeLine {
  uint64_t terminal;       // bit i: a key ends at node 64 j + i
  uint64_t leaf;           // bit i: fan-out 0 (a leaf is always terminal, except the root of an empty trie)
  uint32_t terminal_rank;  // terminals before node 64 j
  uint32_t first_child;    // child id where node 64 j's children begin
  uint32_t wide;           // row in the wide table, or kNotWide
  uint32_t high_rank;      // labels with a high part before node 64 j
};
static_assert(sizeof(NodeLine) == 32, "one sector");

// Pointers and counts only; the arrays belong to whoever opened the index.
struct TrieView {
  const uint64_t* louds;       // (2 num_nodes - 1) bits, then at least 4 spare words of ones
  const NodeLine* lines;       // ceil(num_nodes / 64)
  const uint32_t* wide;        // kWideStride child ids a row: first child of each of the 64 nodes, then the end
  const uint16_t* label_low;   // num_nodes; the root's is 0 and means nothing
  const uint64_t* high_flags;  // bit a node: its label exceeds 16 bits; null where high_width = 0
  const uint64_t* high_bits;   // packed high parts, high_width bits each, in node order
  uint32_t num_nodes;
  uint32_t num_keys;
  int32_t high_width;          // 0 to 15
};

struct ChildRange {
  uint32_t first, last;  // half-open
  FT_HD uint32_t fan_out() const { return last - first; }
};

FT_HD bool is_terminal(const TrieView& trie, uint32_t node) {
  return (trie.lines[node >> 6].terminal >> (node & 63)) & 1;
}

FT_HD bool is_leaf(const TrieView& trie, uint32_t node) { return (trie.lines[node >> 6].leaf >> (node & 63)) & 1; }

// Rank of a terminal node among the terminals.
FT_HD uint32_t key_id(const TrieView& trie, uint32_t node) {
  const NodeLine& line = trie.lines[node >> 6];
  return line.terminal_rank + popcount64(line.terminal & ((uint64_t(1) << (node & 63)) - 1));
}

// Children of a node, given what its line says. Reads at most 9 louds words, 2 to 3 as a rule.
FT_HD ChildRange child_range(const TrieView& trie, uint32_t node, uint32_t line_first_child, uint32_t line_wide) {
  int skip = static_cast<int>(node & 63);
  if (line_wide != kNotWide) {
    const uint32_t* row = trie.wide + static_cast<uint64_t>(line_wide) * kWideStride + skip;
    return {row[0], row[1]};
  }
  const uint64_t begin = static_cast<uint64_t>(node - skip) + line_first_child - 1;
  uint64_t word = begin >> 6;
  uint64_t zeros = ~trie.louds[word] & (~uint64_t(0) << (begin & 63));
  uint64_t start = begin;  // where this node's own ones begin
  if (skip > 0) {
    int count = popcount64(zeros);
    while (count < skip) {
      skip -= count;
      zeros = ~trie.louds[++word];
      count = popcount64(zeros);
    }
    const int bit = select_one64(zeros, skip - 1);
    start = (word << 6) + bit + 1;
    zeros &= bit == 63 ? 0 : ~uint64_t(0) << (bit + 1);
  }
  while (zeros == 0) zeros = ~trie.louds[++word];
  const uint64_t end = (word << 6) + lowest_one64(zeros);
  const uint32_t first = static_cast<uint32_t>(start - node) + 1;
  return {first, first + static_cast<uint32_t>(end - start)};
}

FT_HD ChildRange child_range(const TrieView& trie, uint32_t node) {
  const NodeLine& line = trie.lines[node >> 6];
  return child_range(trie, node, line.first_child, line.wide);
}

// The part of a label above 16 bits; 0 for almost every node of a small vocabulary.
FT_HD uint32_t label_high(const TrieView& trie, uint32_t node) {
  if (trie.high_width == 0) return 0;
  const uint64_t flags = trie.high_flags[node >> 6];
  const int bit = static_cast<int>(node & 63);
  if (!((flags >> bit) & 1)) return 0;
  const uint64_t rank = trie.lines[node >> 6].high_rank + popcount64(flags & ((uint64_t(1) << bit) - 1));
  return packed_get(trie.high_bits, rank, trie.high_width);
}

FT_HD uint32_t label(const TrieView& trie, uint32_t node) {
  return (label_high(trie, node) << 16) | trie.label_low[node];
}

// Labels with a high part before a node.
FT_HD uint64_t high_rank(const TrieView& trie, uint32_t node) {
  const uint64_t below = (uint64_t(1) << (node & 63)) - 1;
  return uint64_t(trie.lines[node >> 6].high_rank) + popcount64(trie.high_flags[node >> 6] & below);
}

// First of the siblings whose label exceeds 16 bits; they stand behind the others. Sets the rank of its high part.
FT_HD uint32_t first_high(const TrieView& trie, ChildRange range, uint64_t* rank) {
  const uint32_t last = range.last - 1;
  *rank = high_rank(trie, range.first);
  return range.last - static_cast<uint32_t>(high_rank(trie, last) + test_bit(trie.high_flags, last) - *rank);
}

// The child with this label, or kNoNode. Binary search over the siblings, which ascend by whole label: among those
// up to 16 bits the low halves alone decide, and the high parts of the others lie side by side.
FT_HD uint32_t find_child(const TrieView& trie, ChildRange range, uint32_t token) {
  if (range.first == range.last) return kNoNode;
  uint64_t rank = 0;
  const uint32_t boundary = trie.high_width == 0 ? range.last : first_high(trie, range, &rank);
  if (token <= 0xffff) {
    uint32_t low = range.first, size = boundary - range.first;
    if (size == 0) return kNoNode;
    while (size > 1) {  // halving without branches
      const uint32_t half = size / 2;
      low = trie.label_low[low + half] <= token ? low + half : low;
      size -= half;
    }
    return trie.label_low[low] == token ? low : kNoNode;
  }
  uint32_t low = boundary, size = range.last - boundary;
  if (size == 0) return kNoNode;
  rank -= boundary;  // so that rank + node is the place of a node's high part
  while (size > 1) {
    const uint32_t half = size / 2, at = low + half;
    const uint32_t label = (packed_get(trie.high_bits, rank + at, trie.high_width) << 16) | trie.label_low[at];
    low = label <= token ? at : low;
    size -= half;
  }
  const uint32_t found = (packed_get(trie.high_bits, rank + low, trie.high_width) << 16) | trie.label_low[low];
  return found == token ? low : kNoNode;
}

}  // namespace flashtrie
