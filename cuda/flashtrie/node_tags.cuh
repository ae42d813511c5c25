// Two arrays that only the GPU's search has, made from the trie when it is uploaded: what the search asks of a node that
// matches, one read deep. A louds word and a packed high part are smaller (0.3 bytes a node and high_width bits), but a
// query that waits for each of its reads, and for each instruction that takes a word apart, pays for them in latency.
//
//   tags   4 bytes a node: children of the node's line up to and with its own, whether a key ends, high part of its label
//   heads  8 bytes a line: where the children of the line begin
#pragma once
#include "trie.cuh"

namespace flashtrie {

constexpr uint32_t kTagChildren = 0xffff;      // children of the line's nodes up to this one, with its own
constexpr uint32_t kTagTerminal = 1u << 16;
constexpr int kTagHighShift = 17;              // the label above 16 bits

struct alignas(8) LineHead {
  uint32_t first_child;
  uint32_t wide;  // row in the wide table of a line with more children than a tag can count, else kNotWide
};

// Children of the last node of a line end here.
FT_HD uint32_t line_end(const TrieView& trie, uint32_t line) {
  const uint32_t behind = (line + 1) * kLineNodes;
  return child_range(trie, (behind < trie.num_nodes && behind != 0 ? behind : trie.num_nodes) - 1).last;
}

FT_HD LineHead make_head(const TrieView& trie, uint32_t line) {
  const NodeLine& from = trie.lines[line];
  const bool counts = line_end(trie, line) - from.first_child <= kTagChildren;
  return {from.first_child, counts ? kNotWide : from.wide};
}

FT_HD uint32_t make_tag(const TrieView& trie, uint32_t node) {
  const uint32_t children = child_range(trie, node).last - trie.lines[node >> 6].first_child;
  return (children & kTagChildren) | (is_terminal(trie, node) ? kTagTerminal : 0) | label_high(trie, node) << kTagHighShift;
}

}  // namespace flashtrie
