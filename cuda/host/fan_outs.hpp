// The fan-outs of the nodes, one after another, from their unary codes.
#pragma once
#include <cstdint>

#include "trie.hpp"

namespace flashtrie {

// Walks the unary codes of louds node by node, a word at a time.
class FanOuts {
 public:
  FanOuts(const uint64_t* words, uint64_t num_bits, uint64_t start = 0)
      : words_(words), num_bits_(num_bits), at_(start) {}

  // Fan-out of the next node; refuses to run past the end.
  uint64_t next() {
    uint64_t ones = 0;
    while (true) {
      const uint64_t zeros = ~words_[at_ >> 6] >> (at_ & 63);
      const uint64_t in_word = 64 - (at_ & 63);
      const uint64_t run = zeros == 0 ? in_word : static_cast<uint64_t>(lowest_one64(zeros));
      const uint64_t step = run < in_word ? run : in_word;
      ones += step;
      at_ += step;
      if (at_ >= num_bits_) throw InvalidTrie("louds has fewer zeros than nodes");
      if (step < in_word) {
        ++at_;
        return ones;
      }
    }
  }

  uint64_t position() const { return at_; }

 private:
  const uint64_t* words_;
  uint64_t num_bits_;
  uint64_t at_;
};

}  // namespace flashtrie
