#include "tails.hpp"

#include <cstring>

#include "fan_outs.hpp"

namespace flashtrie {
namespace {

constexpr size_t kAhead = 16;              // labels of the store under way, each a cache miss of its own
constexpr uint32_t kStored = 0xffffffffu;  // in a level: the next stored node, rather than a place in the tail store

[[noreturn]] void refuse(const char* why) { throw InvalidTrie(why); }

uint32_t tail_label(const TailArrays& tails, uint64_t place) {
  uint32_t label = 0;
  memcpy(&label, tails.labels + place * tails.label_size, tails.label_size);
  return label;
}

void check_sizes(const TrieArrays& a, const TailArrays& t, uint64_t num_nodes) {
  if (num_nodes < 1 || num_nodes > kMaxNodes || a.num_nodes < 1 || a.num_nodes > num_nodes)
    refuse("number of nodes out of range");
  if (a.louds_words < (2 * a.num_nodes - 1 + 63) / 64) refuse("louds is too short for its nodes");
  if (a.terminal_words < (a.num_nodes + 63) / 64) refuse("terminal is too short for its nodes");
  if (a.num_labels < a.num_nodes) refuse("label_low is too short for its nodes");
  if (a.high_width < 0 || a.high_width > kMaxHighWidth) refuse("high part of labels is too wide");
  if (a.high_width > 0 && a.high_flag_words < (a.num_nodes + 63) / 64) refuse("high_flags is too short for its nodes");
  if (a.high_width > 0 && a.high_words < kSpareWords) refuse("label_high is too short for its flags");
  if (t.num_labels < 1 || t.num_labels >= kStored || t.label_size < 1 || t.label_size > 4)
    refuse("number of tail labels out of range");
  if (t.end_words < (t.num_labels + 63) / 64) refuse("tail_ends is too short for its labels");
  if (t.link_width < 1 || t.link_width > 32) refuse("links of a width out of range");
  if (t.num_links > a.num_nodes || t.link_words < (t.num_links * t.link_width + 63) / 64 + 1)
    refuse("tail_links is too short for its links");
}

// Labels from each place of the store to the end of its tail.
std::vector<uint32_t> tail_lengths(const TailArrays& tails) {
  std::vector<uint32_t> lengths(tails.num_labels);
  if (!test_bit(tails.ends, tails.num_labels - 1)) refuse("has a tail without an end");
  for (uint64_t place = tails.num_labels; place-- > 0;)
    lengths[place] = test_bit(tails.ends, place) ? 1 : lengths[place + 1] + 1;
  return lengths;
}

// Checks the links against the leaves, and that the whole is as large as it says.
void check_links(const TrieArrays& stored, const TailArrays& tails, uint64_t num_nodes) {
  FanOuts fan_outs(stored.louds, 2 * stored.num_nodes - 1);
  uint64_t leaves = 0;
  for (uint64_t node = 0; node < stored.num_nodes; ++node) leaves += fan_outs.next() == 0 && node > 0;
  const bool is_odd = leaves % 64 != 0;
  if (tails.link_flag_words != (leaves + 63) / 64 ||
      (is_odd && tails.link_flags[leaves / 64] >> (leaves % 64) != 0))
    refuse("has link flags for other leaves than its own");
  uint64_t links = 0;
  for (uint64_t word = 0; word < tails.link_flag_words; ++word) links += popcount64(tails.link_flags[word]);
  if (links != tails.num_links) refuse("has another number of links than it says");
  const std::vector<uint32_t> lengths = tail_lengths(tails);
  uint64_t total = stored.num_nodes;
  for (uint64_t link = 0; link < links; ++link) {
    const uint32_t place = packed_get(tails.links, link, tails.link_width);
    if (place >= tails.num_labels) refuse("has a link past the end of the tails");
    total += lengths[place];
  }
  if (total != num_nodes) refuse("has another number of nodes than it says");
}

// Appends the nodes of the whole trie in level order.
class Unfolding {
 public:
  Unfolding(const TrieArrays& stored, const TailArrays& tails, uint64_t num_nodes)
      : stored_(stored), tails_(tails), fan_outs_(stored.louds, 2 * stored.num_nodes - 1) {
    whole_.louds.assign((2 * num_nodes - 1 + 63) / 64 + kSpareWords, 0);
    whole_.terminal.assign((num_nodes + 63) / 64, 0);
    whole_.label_low.resize(num_nodes);
    if (stored.high_width > 0) whole_.high_flags.assign((num_nodes + 63) / 64, 0);
  }

  WholeTrie run() {
    std::vector<uint32_t> level{kStored}, below;
    for (uint64_t depth = 0; !level.empty(); ++depth, level.swap(below)) {
      if (depth > kMaxDepth) refuse("has tails that lead too deep");
      below.clear();
      for (size_t i = 0; i < level.size(); ++i) {
        if (i + kAhead < level.size() && level[i + kAhead] != kStored) prefetch(level[i + kAhead]);
        level[i] == kStored ? put_stored(below) : put_tail(level[i], below);
      }
    }
    if (node_ != stored_.num_nodes) refuse("louds does not describe a tree");
    if (stored_.high_width > 0) {
      if (high_used_ > 0) whole_.label_high.push_back(high_word_);
      whole_.label_high.resize(whole_.label_high.size() + kSpareWords);
    }
    return std::move(whole_);
  }

 private:
  void prefetch(uint32_t place) const {
    __builtin_prefetch(tails_.labels + uint64_t(place) * tails_.label_size);
    __builtin_prefetch(tails_.ends + (place >> 6));
  }

  void put_stored(std::vector<uint32_t>& below) {
    const uint64_t fan_out = fan_outs_.next();
    children_ += fan_out;
    if (children_ > stored_.num_nodes) refuse("louds has more children than nodes");
    const bool is_terminal = test_bit(stored_.terminal, node_);
    if (fan_out == 0 && node_ > 0 && !is_terminal) refuse("a node has neither children nor a key");
    const bool is_link = fan_out == 0 && node_ > 0 && test_bit(tails_.link_flags, leaves_++);
    if (is_link) below.push_back(packed_get(tails_.links, links_++, tails_.link_width));
    below.insert(below.end(), fan_out, kStored);
    uint32_t label = stored_.label_low[node_];
    if (stored_.high_width > 0 && test_bit(stored_.high_flags, node_)) {
      if ((highs_ + 1) * stored_.high_width > 64 * (stored_.high_words - kSpareWords))
        refuse("label_high is too short for its flags");
      const uint32_t high = packed_get(stored_.high_bits, highs_++, stored_.high_width);
      if (high == 0 && node_ > 0) refuse("a label is flagged as above 16 bits and is not");
      label |= high << 16;
    }
    put(is_link ? 1 : fan_out, label, !is_link && is_terminal);
    ++node_;
  }

  void put_tail(uint32_t place, std::vector<uint32_t>& below) {
    const bool is_end = test_bit(tails_.ends, place);
    if (!is_end) below.push_back(place + 1);
    put(is_end ? 0 : 1, tail_label(tails_, place), is_end);
  }

  void put(uint64_t fan_out, uint32_t label, bool is_terminal) {
    for (uint64_t one = 0; one < fan_out; ++one, ++bit_) whole_.louds[bit_ >> 6] |= uint64_t(1) << (bit_ & 63);
    ++bit_;
    whole_.label_low[at_] = static_cast<uint16_t>(label);
    whole_.terminal[at_ >> 6] |= uint64_t(is_terminal) << (at_ & 63);
    if (label >> 16) put_high(label >> 16);
    ++at_;
  }

  void put_high(uint32_t high) {
    const int width = stored_.high_width;
    if (high >> width) refuse("has tails with larger labels than it says");
    whole_.high_flags[at_ >> 6] |= uint64_t(1) << (at_ & 63);
    high_word_ |= uint64_t(high) << high_used_;
    high_used_ += width;
    if (high_used_ < 64) return;
    whole_.label_high.push_back(high_word_);
    high_used_ -= 64;
    high_word_ = high_used_ > 0 ? high >> (width - high_used_) : 0;
  }

  const TrieArrays& stored_;
  const TailArrays& tails_;
  FanOuts fan_outs_;
  WholeTrie whole_;
  uint64_t node_ = 0, children_ = 1, leaves_ = 0, links_ = 0, highs_ = 0;  // of the stored trie, so far
  uint64_t at_ = 0, bit_ = 0;                                             // of the whole one
  uint64_t high_word_ = 0;
  int high_used_ = 0;
};

}  // namespace

WholeTrie unfold_tails(const TrieArrays& stored, const TailArrays& tails, uint64_t num_nodes) {
  check_sizes(stored, tails, num_nodes);
  check_links(stored, tails, num_nodes);
  return Unfolding(stored, tails, num_nodes).run();
}

}  // namespace flashtrie
