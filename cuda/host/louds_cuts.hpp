// Places in louds from which a walk over the nodes can begin, so that several threads share one.
#pragma once
#include <cstdint>
#include <vector>

#include "trie.hpp"

namespace flashtrie {

// Before a node: its number, a multiple of 64 but for the end's; where its unary code begins; its first child, or that of
// the next node that has one; and how many nodes before it count as inner ones (those with children, and the root).
struct LoudsCut {
  uint64_t node, position, child, num_inner;
};

// Cuts from the first node to behind the last: [cut i, cut i + 1) for a thread. One piece for all where one thread is
// enough, and where the bits have not the ones and zeros of so many nodes: whoever walks them finds out why.
std::vector<LoudsCut> cut_louds(const uint64_t* louds, uint64_t num_nodes, int num_threads);

}  // namespace flashtrie
