// The levels of a growing trie: for each level a few streams that only ever grow at the end, in memory or,
// past a budget, in a temporary file. Read back level after level they are the sections of the index.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "section_stream.hpp"
#include "temp_file.hpp"

namespace flashtrie {

// Bytes appended at the end; older ones may lie in the temporary file.
class Stream {
 public:
  template <typename T>
  void push(T value) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
    tail_.insert(tail_.end(), bytes, bytes + sizeof(T));
  }
  uint64_t size() const { return spilled_ + tail_.size(); }
  uint64_t memory() const { return tail_.capacity(); }
  void spill(TempFile& file);
  // Hands all bytes in order to `sink(data, size)`.
  void read(const TempFile& file, const std::function<void(const uint8_t*, size_t)>& sink) const;

 private:
  struct Segment {
    uint64_t offset, size;
  };
  std::vector<uint8_t> tail_;
  std::vector<Segment> segments_;
  uint64_t spilled_ = 0;
};

class BitStream {
 public:
  void push(bool bit) {
    word_ |= uint64_t(bit) << (num_bits_ & 63);
    if ((++num_bits_ & 63) == 0) {
      words_.push(word_);
      word_ = 0;
    }
  }
  uint64_t num_bits() const { return num_bits_; }
  Stream& words() { return words_; }
  const Stream& words() const { return words_; }
  // Hands all bits in order to `joiner`.
  void read(const TempFile& file, BitJoiner& joiner) const;

 private:
  Stream words_;
  uint64_t word_ = 0;
  uint64_t num_bits_ = 0;
};

// What the nodes of one level are, and the fan-outs of these nodes.
struct Level {
  Stream label_low;      // uint16 a node; compact: less that of the sibling before, modulo 65536
  BitStream high_flags;  // a node; only filled once a high part has been seen at this level
  Stream label_high;     // uint16 a flagged node
  BitStream terminal;    // a node; compact: a node with children, since a leaf is always terminal
  BitStream louds;       // a one for each child, a zero when a node closes
  BitStream links;       // a leaf other than the root: its key goes on in a tail
  uint64_t num_nodes = 0;
};

}  // namespace flashtrie
