#include "trie_layout.hpp"

#include <algorithm>
#include <cstring>

namespace flashtrie {

TrieLayout::TrieLayout(bool is_compact, const TempFile& spill)
    : is_compact_(is_compact), spill_(spill), levels_(1), num_links_(1), path_terminal_(1) {
  levels_[0].num_nodes = 1;
  levels_[0].label_low.push<uint16_t>(0);
}

// The nodes below the shared ones close, and new ones open.
void TrieLayout::append(const std::vector<uint32_t>& tokens, size_t common, size_t end) {
  for (size_t depth = path_.size(); depth > common; --depth) close_node(depth);
  if (levels_.size() <= end) {
    levels_.resize(end + 1);
    num_links_.resize(end + 1);
  }
  path_terminal_.resize(end + 1);
  if (tokens.empty()) path_terminal_[0] = 1;
  for (size_t depth = common + 1; depth <= end; ++depth) {
    const bool has_sibling = depth == common + 1 && path_.size() > common;
    open_node(depth, tokens[depth - 1], has_sibling ? path_[common] : 0, depth == end);
  }
  is_link_ = end < tokens.size();
  num_links_[end] += is_link_;
  path_.assign(tokens.begin(), tokens.begin() + static_cast<int64_t>(end));
}

void TrieLayout::finish() {
  // The deepest first; the root's bits end level 0.
  for (size_t depth = path_.size() + 1; depth-- > 0;) close_node(depth);
}

void TrieLayout::open_node(size_t depth, uint32_t token, uint32_t previous_sibling, bool is_terminal) {
  levels_[depth - 1].louds.push(true);
  Level& level = levels_[depth];
  level.label_low.push(static_cast<uint16_t>(is_compact_ ? token - previous_sibling : token));
  if (token >> 16) {
    // Flags are kept only from the first high part of a level on; the nodes before had none.
    while (level.high_flags.num_bits() < level.num_nodes) level.high_flags.push(false);
    level.high_flags.push(true);
    level.label_high.push(static_cast<uint16_t>(token >> 16));
  }
  path_terminal_[depth] = is_terminal;
  if (!is_compact_) level.terminal.push(is_terminal);
  ++level.num_nodes;
}

// Nodes of a level close in the order in which they opened. The end of the path has no children.
void TrieLayout::close_node(size_t depth) {
  levels_[depth].louds.push(false);
  const bool is_leaf = depth == path_.size() && depth > 0;
  if (is_leaf) levels_[depth].links.push(is_link_);
  const bool holds_bit = is_compact_ ? !is_leaf : depth == 0;
  if (holds_bit) levels_[depth].terminal.push(path_terminal_[depth]);
}

void TrieLayout::spill(TempFile& file) {
  constexpr uint64_t kSmall = 1 << 12;
  auto spill_one = [&file](Stream& stream) {
    if (stream.memory() >= kSmall) stream.spill(file);
  };
  for (Level& level : levels_) {
    for (Stream* stream : {&level.label_low, &level.label_high}) spill_one(*stream);
    for (BitStream* stream : {&level.high_flags, &level.terminal, &level.louds, &level.links})
      spill_one(stream->words());
  }
}

bool TrieLayout::read(const std::string& section, int high_width, const Chunk& chunk) const {
  Batcher batcher(chunk);
  BitJoiner joiner(batcher);
  if (section == "louds") {
    read_bits(&Level::louds, false, joiner);
  } else if (section == "terminal" || section == "inner_terminal") {
    read_bits(&Level::terminal, false, joiner);
  } else if (section == "high_flags") {
    read_bits(&Level::high_flags, true, joiner);
  } else if (section == "link_flags") {
    read_bits(&Level::links, false, joiner);
  } else if (section == "label_low" || section == "label_delta") {
    for (const Level& level : levels_)
      level.label_low.read(spill_, [&](const uint8_t* data, size_t size) { batcher.put(data, size); });
  } else if (section == "label_high") {
    for (const Level& level : levels_)
      level.label_high.read(spill_, [&](const uint8_t* data, size_t size) {
        for (size_t i = 0; i < size; i += 2) {
          uint16_t high;
          memcpy(&high, data + i, 2);
          joiner.put(high, high_width);
        }
      });
  } else {
    return false;
  }
  joiner.finish();
  batcher.flush();
  return true;
}

// The bit strings of all levels end to end. Flags may be shorter than their level: the rest is zero.
void TrieLayout::read_bits(BitStream Level::*stream, bool pad_to_nodes, BitJoiner& joiner) const {
  for (const Level& level : levels_) {
    const BitStream& bits = level.*stream;
    bits.read(spill_, joiner);
    if (!pad_to_nodes) continue;
    for (uint64_t missing = level.num_nodes - bits.num_bits(); missing > 0;) {
      const int count = static_cast<int>(std::min<uint64_t>(missing, 64));
      joiner.put(0, count);
      missing -= count;
    }
  }
}

}  // namespace flashtrie
