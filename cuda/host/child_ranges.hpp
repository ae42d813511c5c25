// Where the children of several nodes are: selects in the louds words, by BMI2 where there is some.
#pragma once
#include <cstdint>

#include "flashtrie/trie.cuh"

namespace flashtrie {

// Writes the child range of each of `count` nodes.
using FindChildRanges = void (*)(const TrieView& trie, const uint32_t* nodes, uint32_t count, ChildRange* ranges);

void find_child_ranges_portable(const TrieView& trie, const uint32_t* nodes, uint32_t count, ChildRange* ranges);
// The fastest that this processor runs, found once.
FindChildRanges find_child_ranges();

}  // namespace flashtrie
