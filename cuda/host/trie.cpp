#include "trie.hpp"

#include "fan_outs.hpp"
#include "louds_cuts.hpp"
#include "threads.hpp"

namespace flashtrie {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw InvalidTrie(why); }

void check_sizes(const TrieArrays& a) {
  if (a.num_nodes < 1 || a.num_nodes > kMaxNodes) refuse("number of nodes out of range");
  const uint64_t node_words = (a.num_nodes + 63) / 64;
  const uint64_t louds_words = (2 * a.num_nodes - 1 + 63) / 64;
  if (a.louds_words < louds_words + kSpareWords) refuse("louds is too short for its nodes");
  if (a.terminal_words < node_words) refuse("terminal is too short for its nodes");
  if (a.num_labels < a.num_nodes) refuse("label_low is too short for its nodes");
  if (a.high_width < 0 || a.high_width > kMaxHighWidth) refuse("high part of labels is too wide");
  if (a.high_width > 0 && a.high_flag_words < node_words) refuse("high_flags is too short for its nodes");
}

// A label whose flag tells the truth: among siblings the flagged ones come last, and readers rely on it.
uint32_t checked_label(const TrieView& trie, uint32_t node) {
  const uint32_t high = label_high(trie, node);
  if (high == 0 && trie.high_width > 0 && test_bit(trie.high_flags, node))
    refuse("a label is flagged as above 16 bits and is not");
  return (high << 16) | trie.label_low[node];
}

}  // namespace

Restored<uint16_t> restore_labels(const uint64_t* louds, uint64_t num_nodes, const uint16_t* label_delta, int num_threads) {
  Restored<uint16_t> labels(num_nodes);
  const std::vector<LoudsCut> cuts = cut_louds(louds, num_nodes, num_threads);
  if (cuts.size() == 2) std::fill(labels.begin(), labels.end(), 0);  // louds may have fewer children than nodes
  parallel_for(cuts.size() - 1, 1, num_threads, [&](int, uint64_t piece, uint64_t) {
    FanOuts fan_outs(louds, 2 * num_nodes - 1, cuts[piece].position);
    uint64_t child = cuts[piece].child;
    if (piece == 0) labels[0] = 0;
    for (uint64_t node = cuts[piece].node; node < cuts[piece + 1].node; ++node) {
      const uint64_t last = child + fan_outs.next();
      if (last > num_nodes) refuse("louds has more children than nodes");
      for (uint16_t label = 0; child < last; ++child) labels[child] = label = static_cast<uint16_t>(label + label_delta[child]);
    }
  });
  return labels;
}

Restored<uint64_t> restore_terminal(const uint64_t* louds, uint64_t num_nodes, const uint64_t* inner_terminal,
                                    uint64_t num_words, int num_threads) {
  Restored<uint64_t> terminal((num_nodes + 63) / 64);
  const std::vector<LoudsCut> cuts = cut_louds(louds, num_nodes, num_threads);
  parallel_for(cuts.size() - 1, 1, num_threads, [&](int, uint64_t piece, uint64_t) {
    FanOuts fan_outs(louds, 2 * num_nodes - 1, cuts[piece].position);
    uint64_t inner = cuts[piece].num_inner, word = 0;
    const uint64_t end = cuts[piece + 1].node;
    for (uint64_t node = cuts[piece].node; node < end; ++node) {
      const bool is_leaf = fan_outs.next() == 0 && node > 0;
      if (!is_leaf && inner >= 64 * num_words) refuse("inner_terminal is too short for its nodes");
      const bool bit = is_leaf || test_bit(inner_terminal, inner);
      inner += !is_leaf;
      word |= uint64_t(bit) << (node & 63);
      if ((node & 63) != 63 && node + 1 < end) continue;
      terminal[node >> 6] = word;
      word = 0;
    }
  });
  return terminal;
}

Trie::Trie(const TrieArrays& arrays, int num_threads) {
  check_sizes(arrays);
  view_.louds = arrays.louds;
  view_.label_low = arrays.label_low;
  view_.num_nodes = static_cast<uint32_t>(arrays.num_nodes);
  view_.high_width = arrays.high_width;
  view_.high_flags = arrays.high_width > 0 ? arrays.high_flags : nullptr;
  view_.high_bits = arrays.high_bits;
  derive_lines(arrays, num_threads);
  view_.lines = lines_.data();
  view_.wide = wide_.data();
  find_levels();
  check_siblings(num_threads);
  index_root();
}

// What a thread finds of its part of the nodes.
struct Trie::LinesPart {
  uint64_t terminals = 0, highs = 0;  // before it
  uint64_t end_child = 0, end_position = 0;
  std::vector<uint32_t> wide;
};

void Trie::derive_lines(const TrieArrays& arrays, int num_threads) {
  const uint64_t num_nodes = arrays.num_nodes;
  lines_.resize((num_nodes + 63) / 64);
  const std::vector<LoudsCut> cuts = cut_louds(arrays.louds, num_nodes, num_threads);
  std::vector<LinesPart> parts(cuts.size());
  for (size_t piece = 0; piece + 1 < cuts.size(); ++piece) {
    LinesPart& next = parts[piece + 1] = {parts[piece].terminals, parts[piece].highs, 0, 0, {}};
    for (uint64_t at = cuts[piece].node / kLineNodes; at * kLineNodes < cuts[piece + 1].node; ++at) {
      next.terminals += popcount64(arrays.terminal[at]);
      if (arrays.high_width > 0) next.highs += popcount64(arrays.high_flags[at]);
    }
  }
  parallel_for(cuts.size() - 1, 1, num_threads, [&](int, uint64_t piece, uint64_t) {
    derive_lines(arrays, cuts[piece], cuts[piece + 1].node, parts[piece]);
  });
  for (size_t piece = 0; piece + 1 < cuts.size(); ++piece) {
    const uint32_t before = static_cast<uint32_t>(wide_.size() / kWideStride);
    wide_.insert(wide_.end(), parts[piece].wide.begin(), parts[piece].wide.end());
    if (before == 0 || parts[piece].wide.empty()) continue;
    for (uint64_t at = cuts[piece].node / kLineNodes; at * kLineNodes < cuts[piece + 1].node; ++at)
      if (lines_[at].wide != kNotWide) lines_[at].wide += before;
  }
  const LinesPart& last = parts[cuts.size() - 2];
  if (last.end_child != num_nodes || last.end_position != 2 * num_nodes - 1) refuse("louds has fewer children than nodes");
  view_.num_keys = static_cast<uint32_t>(parts.back().terminals);
  if (arrays.high_width > 0 && (parts.back().highs * arrays.high_width + 63) / 64 + kSpareWords > arrays.high_words)
    refuse("label_high is too short for its flags");
}

// The lines of the nodes from a cut on, to `end_node`.
void Trie::derive_lines(const TrieArrays& arrays, const LoudsCut& cut, uint64_t end_node, LinesPart& part) {
  const uint64_t num_nodes = arrays.num_nodes;
  FanOuts fan_outs(arrays.louds, 2 * num_nodes - 1, cut.position);
  uint32_t row[kWideStride];
  uint64_t child = cut.child, terminals = part.terminals, highs = part.highs;
  for (uint64_t at = cut.node / kLineNodes; at * kLineNodes < end_node; ++at) {
    const uint64_t begin = at * kLineNodes;
    const int count = static_cast<int>(std::min<uint64_t>(kLineNodes, num_nodes - begin));
    const uint64_t first_bit = fan_outs.position();
    const uint64_t valid = count == 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1;
    NodeLine& line = lines_[at];
    line.terminal = arrays.terminal[at];
    if (line.terminal & ~valid) refuse("terminal has bits behind the last node");
    line.leaf = 0;
    line.terminal_rank = static_cast<uint32_t>(terminals);
    line.first_child = static_cast<uint32_t>(child);
    line.wide = kNotWide;
    line.high_rank = static_cast<uint32_t>(highs);
    for (int i = 0; i < count; ++i) {
      row[i] = static_cast<uint32_t>(child);
      // Level order: a node's children come behind it, or the node could not have been reached.
      if (child <= begin + i) refuse("louds does not describe a tree");
      const uint64_t fan_out = fan_outs.next();
      if (fan_out == 0) line.leaf |= uint64_t(1) << i;
      child += fan_out;
      if (child > num_nodes) refuse("louds has more children than nodes");
    }
    for (int i = count; i < kWideStride; ++i) row[i] = static_cast<uint32_t>(child);
    if (fan_outs.position() - first_bit > kWideBits) {
      line.wide = static_cast<uint32_t>(part.wide.size() / kWideStride);
      part.wide.insert(part.wide.end(), row, row + kWideStride);
    }
    if (line.leaf & ~line.terminal & ~uint64_t(at == 0)) refuse("a node has neither children nor a key");
    terminals += popcount64(line.terminal);
    if (arrays.high_width > 0) {
      if (arrays.high_flags[at] & ~valid) refuse("high_flags has bits behind the last node");
      highs += popcount64(arrays.high_flags[at]);
    }
  }
  part.end_child = child;
  part.end_position = fan_outs.position();
}

void Trie::find_levels() {
  level_starts_ = {0, 1};
  for (uint32_t end = 1; end < view_.num_nodes; level_starts_.push_back(end)) {
    end = child_range(view_, end - 1).last;  // the last child of a level ends the next one
    if (level_starts_.size() > kMaxDepth + 1) refuse("the trie is deeper than 65535");
  }
}

void Trie::index_root() {
  constexpr uint32_t kMaxPlaces = 1 << 16;
  const ChildRange root = child_range(view_, 0);
  const uint32_t largest = root.fan_out() > 0 ? label(view_, root.last - 1) : 0;
  while ((largest >> root_shift_) >= kMaxPlaces) ++root_shift_;
  root_starts_.reserve((largest >> root_shift_) + 2);
  for (uint32_t child = root.first; child < root.last; ++child) {
    const uint32_t place = label(view_, child) >> root_shift_;
    while (root_starts_.size() <= place) root_starts_.push_back(child);
  }
  root_starts_.push_back(root.last);
}

void Trie::check_siblings(int num_threads) {
  const TrieView& trie = view_;
  std::atomic<uint32_t> largest{0};
  const uint64_t num_bits = 2 * static_cast<uint64_t>(trie.num_nodes) - 1;
  parallel_for(trie.num_nodes, 1 << 18, num_threads, [&](int, uint64_t begin, uint64_t end) {
    uint32_t child = child_range(trie, static_cast<uint32_t>(begin)).first;
    FanOuts fan_outs(trie.louds, num_bits, begin + child - 1);
    uint32_t own_largest = 0;
    for (uint64_t node = begin; node < end; ++node) {
      const uint32_t last = child + static_cast<uint32_t>(fan_outs.next());
      if (child == last) continue;
      uint32_t previous = checked_label(trie, child);
      for (++child; child < last; ++child) {
        const uint32_t current = checked_label(trie, child);
        if (current <= previous) refuse("siblings are out of order");
        previous = current;
      }
      own_largest = std::max(own_largest, previous);
    }
    uint32_t known = largest.load();
    while (own_largest > known && !largest.compare_exchange_weak(known, own_largest)) {
    }
  });
  largest_label_ = largest.load();
}

}  // namespace flashtrie
