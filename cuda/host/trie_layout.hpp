// Lays out a trie level by level from keys in ascending order, in streams that only ever grow at their end.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "level_store.hpp"

namespace flashtrie {

class TrieLayout {
 public:
  // Compact: label_delta and inner_terminal, for compression, instead of label_low and terminal.
  TrieLayout(bool is_compact, const TempFile& spill);

  // The next key. It shares its first `common` tokens with the one before, and is laid out down to depth `end`: where that is
  // less than its length, the node there becomes a link.
  void append(const std::vector<uint32_t>& tokens, size_t common, size_t end);
  // Closes what is still open; call once, after the last key.
  void finish();

  // Links at a depth so far.
  uint64_t num_links(size_t depth) const { return num_links_[depth]; }
  // Spills what has grown.
  void spill(TempFile& file);
  // The bytes of one section, front to back, in pieces; false where it is none of the trie's own.
  bool read(const std::string& section, int high_width, const Chunk& chunk) const;

 private:
  void open_node(size_t depth, uint32_t token, uint32_t previous_sibling, bool is_terminal);
  void close_node(size_t depth);
  void read_bits(BitStream Level::*stream, bool pad_to_nodes, BitJoiner& joiner) const;

  const bool is_compact_;
  const TempFile& spill_;
  std::vector<Level> levels_;  // levels_[d] holds the nodes at depth d; the root is levels_[0]
  std::vector<uint64_t> num_links_;
  std::vector<uint32_t> path_;  // labels from the root to the node laid out last
  std::vector<uint8_t> path_terminal_;  // for each depth from 0: whether that node of the path is terminal
  bool is_link_ = false;  // the node at the end of the path
};

}  // namespace flashtrie
