// The child range of a node from four louds words that are asked for at once, so that a thread waits for one read
// instead of one after another. Same answer as child_range; what four words don't hold goes that longer way.
#pragma once
#include "simt.cuh"
#include "trie.cuh"

namespace flashtrie {

FT_OUTLINE ChildRange long_child_range(const TrieView& trie, uint32_t node, uint32_t line_first_child) {
  return child_range(trie, node, line_first_child, kNotWide);
}

struct LoudsWindow {
  uint64_t words[4];
  uint32_t row[2];  // of the wide table, where the line names one

  // Where in louds the children of the line's nodes begin.
  FT_DEVICE static uint64_t first_bit(uint32_t node, uint32_t line_first_child) {
    return static_cast<uint64_t>(node & ~63u) + line_first_child - 1;
  }

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

  // In 32-bit halves: what counts here is the number of instructions, one after another.
  FT_DEVICE ChildRange resolve(const TrieView& trie, uint32_t node, uint32_t line_first_child,
                               uint32_t line_wide) const {
    if (line_wide != kNotWide) return {row[0], row[1]};
    const uint64_t begin = first_bit(node, line_first_child);
    const uint32_t skip = node & 63;  // zeros of the nodes before, in the same line
    const uint64_t first = ~words[0] & (~uint64_t(0) << (begin & 63));
    uint32_t zeros[8], upto[8];  // zeros of each half, and of all up to it
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint64_t word = i < 2 ? first : ~words[i / 2];
      zeros[i] = static_cast<uint32_t>(i % 2 ? word >> 32 : word);
      upto[i] = simt::count_ones(zeros[i]) + (i > 0 ? upto[i - 1] : 0);
    }
    if (upto[7] <= skip) return long_child_range(trie, node, line_first_child);
    // The half with the zero that ends the node before (of node 64 j: none, the range begins at `begin`), and the half
    // with the zero that ends this node.
    uint32_t at = zeros[0], at_before = 0, half = 0, end_in = zeros[0], end_half = 0;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
      if (upto[i] < skip) {
        at = zeros[i + 1];
        at_before = upto[i];
        half = i + 1;
      }
      if (upto[i] <= skip) {
        end_in = zeros[i + 1];
        end_half = i + 1;
      }
    }
    const uint64_t base = begin & ~uint64_t(63);
    uint64_t start = begin;
    if (skip > 0) {
      const uint32_t bit = select_one(at, skip - 1 - at_before);
      start = base + 32 * half + bit + 1;
      if (end_half == half) end_in &= ~((2u << bit) - 1);
    }
    const uint64_t end = base + 32 * end_half + simt::lowest_one(end_in);
    const uint32_t first_child = static_cast<uint32_t>(start - node) + 1;
    return {first_child, first_child + static_cast<uint32_t>(end - start)};
  }

 private:
  // Index of the k-th one (k from 0); there are more than k.
  FT_DEVICE static uint32_t select_one(uint32_t word, uint32_t k) {
    uint32_t at = 0;
#pragma unroll
    for (uint32_t half = 16; half > 0; half >>= 1) {
      const uint32_t ones = simt::count_ones(word & ((1u << half) - 1));
      const bool above = k >= ones;
      k -= above ? ones : 0;
      word >>= above ? half : 0;
      at += above ? half : 0;
    }
    return at;
  }
};

}  // namespace flashtrie
