// Binary searches for many labels at once, each among siblings of its own. All halve together, so that their reads
// overlap: one after another they wait for ten reads each, most of which no cache holds in a large trie.
#pragma once
#include <array>
#include <cstdint>

#include "flashtrie/trie.cuh"

namespace flashtrie {

class LabelSearch {
 public:
  static constexpr uint32_t kRoom = 64;  // enough that reads overlap, few enough that what is prefetched stays

  bool is_full() const { return num_probes_ == kRoom; }

  // Siblings [part.first, part.last) have labels that ascend, all up to 16 bits or all above; of the latter, node's
  // high part stands at rank_base + node (modulo 2^32). `beam` comes back with the child.
  void add(ChildRange part, uint32_t token, uint32_t rank_base, uint32_t beam) {
    probes_[num_probes_] = {part.first, part.fan_out(), token, rank_base, beam};
    num_probes_ += part.fan_out() > 0;
  }

  // Calls found(child, beam) for every label that is there, and forgets all.
  template <typename Found>
  void run(const TrieView& trie, const Found& found) {
    for (bool is_open = true; is_open;) {
      is_open = false;
      for (uint32_t i = 0; i < num_probes_; ++i) {
        Probe& probe = probes_[i];
        const uint32_t half = probe.size / 2;
        if (half == 0) continue;
        probe.at = label_of(trie, probe, probe.at + half) <= probe.token ? probe.at + half : probe.at;
        probe.size -= half;
        is_open |= probe.size > 1;
        __builtin_prefetch(trie.label_low + probe.at + probe.size / 2);
        if (probe.token > 0xffff) {
          const uint64_t rank = probe.rank_base + probe.at + probe.size / 2;
          __builtin_prefetch(trie.high_bits + (rank * static_cast<uint64_t>(trie.high_width) >> 6));
        }
      }
    }
    for (uint32_t i = 0; i < num_probes_; ++i)
      if (label_of(trie, probes_[i], probes_[i].at) == probes_[i].token) found(probes_[i].at, probes_[i].beam);
    num_probes_ = 0;
  }

 private:
  struct Probe {
    uint32_t at, size, token, rank_base, beam;
  };

  static uint32_t label_of(const TrieView& trie, const Probe& probe, uint32_t node) {
    const uint32_t low = trie.label_low[node];
    if (probe.token <= 0xffff) return low;
    return packed_get(trie.high_bits, probe.rank_base + node, trie.high_width) << 16 | low;
  }

  std::array<Probe, kRoom + 1> probes_;  // one more, since what cannot be there is written all the same
  uint32_t num_probes_ = 0;
};

}  // namespace flashtrie
