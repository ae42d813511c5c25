// A stored trie whose unbranched ends lie in a tail store, unfolded to the whole trie that it stands for.
#pragma once
#include <cstdint>
#include <vector>

#include "trie.hpp"

namespace flashtrie {

// The tail store, as it lies in the file (docs/format.md).
struct TailArrays {
  const uint64_t* link_flags = nullptr;  // a bit a leaf other than the root
  uint64_t link_flag_words = 0;
  const uint64_t* links = nullptr;  // link_width bits each, then a spare word
  uint64_t link_words = 0;
  int link_width = 0;
  uint64_t num_links = 0;
  const uint64_t* ends = nullptr;  // a bit a label: the last of a tail
  uint64_t end_words = 0;
  const uint8_t* labels = nullptr;  // label_size bytes each
  int label_size = 0;
  uint64_t num_labels = 0;
};

// The arrays of the whole trie, with spare words where TrieArrays wants them.
struct WholeTrie {
  std::vector<uint64_t> louds, terminal, high_flags, label_high;
  std::vector<uint16_t> label_low;
};

// `stored` are the arrays of the nodes that are not in a tail. Nodes are numbered as if nothing had been cut off, so
// whoever walks the trie need not know of tails. Throws InvalidTrie where the arrays are no tree, the tails don't fit, or the
// whole is not of `num_nodes` nodes; nothing is allocated before that is known.
WholeTrie unfold_tails(const TrieArrays& stored, const TailArrays& tails, uint64_t num_nodes);

}  // namespace flashtrie
