// Binary searches for many labels at once, each among siblings of its own. All halve together, without branches, so
// that their reads overlap: one after another they wait for ten reads each, most of which no cache holds in a large trie.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "flashtrie/trie.cuh"

namespace flashtrie {

// A child that a proposal may lead to, and the place of its parent in the frontier.
struct Match {
  uint32_t child, beam;
};

constexpr uint32_t kSearchedTogether = 64;  // enough that reads overlap, few enough that what is prefetched stays

// For labels up to 16 bits, or for those above.
template <bool kIsHigh>
class LabelSearch {
 public:
  // The siblings [part.first, part.last), one at least, ascend and are all of the kind searched for; the high part of a
  // node's label stands at rank_base + node (modulo 2^32). True when there is no room for another.
  bool add(ChildRange part, uint32_t token, uint32_t beam, uint32_t rank_base = 0) {
    probes_[num_probes_++] = {part.first, part.fan_out(), token, beam, rank_base};
    most_ = std::max(most_, part.fan_out());
    return num_probes_ == kSearchedTogether;
  }

  // Writes those children that are there, in no order, with room for kSearchedTogether; forgets all. Returns the end.
  Match* run(const TrieView& view, Match* to) {
    const TrieView trie = view;
    Probe *const begin = probes_.data(), *const end = begin + num_probes_;
    for (int rounds = num_probes_ > 0 ? std::bit_width(most_ - 1) : 0; rounds > 0; --rounds)
      for (Probe* probe = begin; probe < end; ++probe) {
        const uint32_t half = probe->size / 2, middle = probe->at + half;
        const uint32_t at = label_of(trie, *probe, middle) <= probe->token ? middle : probe->at;
        const uint32_t size = probe->size - half;
        probe->at = at;
        probe->size = size;
        __builtin_prefetch(trie.label_low + at + size / 2);
        if (kIsHigh) __builtin_prefetch(trie.high_bits + (high_bit(trie, *probe, at + size / 2) >> 6));
      }
    for (const Probe* probe = begin; probe < end; ++probe) {
      *to = {probe->at, probe->beam};
      to += label_of(trie, *probe, probe->at) == probe->token;
    }
    num_probes_ = most_ = 0;
    return to;
  }

 private:
  struct Probe {
    uint32_t at, size, token, beam, rank_base;
  };

  static uint64_t high_bit(const TrieView& trie, const Probe& probe, uint32_t node) {
    return uint64_t(probe.rank_base + node) * static_cast<uint64_t>(trie.high_width);
  }
  static uint32_t label_of(const TrieView& trie, const Probe& probe, uint32_t node) {
    const uint32_t low = trie.label_low[node];
    return kIsHigh ? packed_get(trie.high_bits, probe.rank_base + node, trie.high_width) << 16 | low : low;
  }

  std::array<Probe, kSearchedTogether> probes_;
  uint32_t num_probes_ = 0, most_ = 0;
};

}  // namespace flashtrie
