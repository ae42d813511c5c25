// LEB128 varints for spilled runs: seven bits a byte, low first.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "temp_file.hpp"

namespace flashtrie {

inline void put_varint(std::vector<uint8_t>& to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to.push_back(static_cast<uint8_t>(value) | 0x80);
  to.push_back(static_cast<uint8_t>(value));
}

// Reads varints from a stretch of a temporary file through a buffer of its own.
class VarintReader {
 public:
  VarintReader(const TempFile& file, uint64_t offset, uint64_t size, size_t buffer_bytes)
      : file_(file), offset_(offset), left_(size), buffer_(buffer_bytes) {}

  bool done() const { return at_ == end_ && left_ == 0; }

  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const uint8_t byte = next_byte();
      value |= uint64_t(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  }

 private:
  uint8_t next_byte() {
    if (at_ == end_) {
      end_ = static_cast<size_t>(std::min<uint64_t>(left_, buffer_.size()));
      file_.read(offset_, buffer_.data(), end_);
      offset_ += end_;
      left_ -= end_;
      at_ = 0;
    }
    return buffer_[at_++];
  }

  const TempFile& file_;
  uint64_t offset_, left_;
  std::vector<uint8_t> buffer_;
  size_t at_ = 0, end_ = 0;
};

}  // namespace flashtrie
