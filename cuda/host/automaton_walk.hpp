// The automaton's state at every node of a byte trie that is given as sorted strings.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "vocabulary_automaton.hpp"

namespace flashtrie {

// For each node but the root (preorder number `node`): outputs[node] = the automaton's output list there,
// labels[node] = the byte that leads to it. `members` ascend and differ, none longer than `deepest`;
// `shared[i]` is what member i has in common with the one before it (0 for the first).
void walk_automaton(const AutomatonView& automaton, const std::vector<std::string_view>& members,
                    const std::vector<uint32_t>& shared, size_t deepest, uint32_t* outputs, uint8_t* labels);

}  // namespace flashtrie
