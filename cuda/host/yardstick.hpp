// A fixed piece of work that a benchmark interleaves with an engine, so that a noisy machine can be told from a slow
// engine. It shares no code with any engine, and must not change: its times are compared across commits.
#pragma once
#include <cstdint>
#include <vector>

namespace flashtrie {

class Yardstick {
 public:
  // `table_size` bytes (a power of two, at least 4096) are read at random: as many as the index takes, so that both
  // depend alike on caches and memory.
  explicit Yardstick(uint64_t table_size);

  // Round number `round`, about 0.2 ms on a core of 2023: what a search does, in fixed proportion. Rounds touch
  // different places, as queries do; a round touches the same ones each time. Returns a number that depends on all.
  uint64_t run(uint64_t round);

 private:
  void gather();  // independent reads, prefetched as the search's are
  void scan();    // short runs of 16-bit values against a bitmap
  void select();  // the best quarter of the gathered numbers

  std::vector<uint64_t> table_;
  std::vector<uint32_t> bitmap_;
  std::vector<uint64_t> gathered_;
  uint64_t state_ = 1;
};

}  // namespace flashtrie
