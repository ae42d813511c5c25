// What the sections of an index are written through: pieces gathered into larger ones, bits joined into words.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace flashtrie {

// Receives the bytes of a section, front to back, in pieces.
using Chunk = std::function<void(const uint8_t*, size_t)>;

// Gathers pieces into larger ones, so that the receiver is called seldom.
class Batcher {
 public:
  explicit Batcher(const Chunk& chunk) : chunk_(chunk) { buffer_.reserve(kBytes + 64); }
  void put(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    buffer_.insert(buffer_.end(), bytes, bytes + size);
    if (buffer_.size() >= kBytes) flush();
  }
  void flush() {
    if (!buffer_.empty()) chunk_(buffer_.data(), buffer_.size());
    buffer_.clear();
  }

 private:
  static constexpr size_t kBytes = 1 << 16;
  const Chunk& chunk_;
  std::vector<uint8_t> buffer_;
};

// Joins bit strings of any length end to end into 64-bit words.
class BitJoiner {
 public:
  explicit BitJoiner(Batcher& to) : to_(to) {}
  void put(uint64_t bits, int count) {  // count 1 to 64, bits above count zero
    word_ |= bits << used_;
    if (used_ + count >= 64) {
      to_.put(&word_, 8);
      word_ = used_ == 0 ? 0 : bits >> (64 - used_);
      used_ += count - 64;
    } else {
      used_ += count;
    }
  }
  void finish() {
    if (used_ > 0) to_.put(&word_, 8);
    word_ = 0;
    used_ = 0;
  }

 private:
  Batcher& to_;
  uint64_t word_ = 0;
  int used_ = 0;
};

}  // namespace flashtrie
