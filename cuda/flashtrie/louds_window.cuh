// The child range of a node from four louds words that are asked for at once, so that a thread waits for one read
// instead of one after another. Same answer as child_range; what four words don't hold goes that longer way.
#pragma once
#include "simt.cuh"
#include "trie.cuh"

namespace flashtrie {

struct LoudsWindow {
  uint64_t words[4];
  uint32_t row[2];  // of the wide table, where the line names one

  // Begins the reads. `line_first_child` and `line_wide` are what the node's line says.
  FT_DEVICE void ask(const TrieView& trie, uint32_t node, uint32_t line_first_child, uint32_t line_wide) {
    if (line_wide != kNotWide) {
      const uint32_t* at = trie.wide + static_cast<uint64_t>(line_wide) * kWideStride + (node & 63);
      row[0] = simt::load_word(at);
      row[1] = simt::load_word(at + 1);
    } else {
      const uint64_t* at = trie.louds + (first_bit(node, line_first_child) >> 6);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = simt::load_word(at + i);
    }
  }

  FT_DEVICE ChildRange resolve(const TrieView& trie, uint32_t node, uint32_t line_first_child,
                               uint32_t line_wide) const {
    if (line_wide != kNotWide) return {row[0], row[1]};
    const uint64_t begin = first_bit(node, line_first_child);
    int skip = static_cast<int>(node & 63);  // zeros of the nodes before, in the same line
    uint64_t zeros = ~words[0] & (~uint64_t(0) << (begin & 63));
    uint64_t next1 = ~words[1], next2 = ~words[2], next3 = ~words[3];
    uint64_t word = begin >> 6;
    uint64_t start = begin;
    if (skip > 0) {
      int count = popcount64(zeros);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        if (count < skip) {
          skip -= count;
          zeros = next1;
          next1 = next2;
          next2 = next3;
          next3 = 0;
          ++word;
          count = popcount64(zeros);
        }
      }
      if (count < skip) return child_range(trie, node, line_first_child, line_wide);
      const int bit = select_one64(zeros, skip - 1);
      start = (word << 6) + bit + 1;
      zeros &= bit == 63 ? 0 : ~uint64_t(0) << (bit + 1);
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (zeros == 0) {
        zeros = next1;
        next1 = next2;
        next2 = next3;
        next3 = 0;
        ++word;
      }
    }
    if (zeros == 0) return child_range(trie, node, line_first_child, line_wide);
    const uint64_t end = (word << 6) + lowest_one64(zeros);
    const uint32_t first = static_cast<uint32_t>(start - node) + 1;
    return {first, first + static_cast<uint32_t>(end - start)};
  }

 private:
  FT_DEVICE static uint64_t first_bit(uint32_t node, uint32_t line_first_child) {
    return static_cast<uint64_t>(node & ~63u) + line_first_child - 1;
  }
};

}  // namespace flashtrie
