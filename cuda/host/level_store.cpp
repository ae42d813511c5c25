#include "level_store.hpp"

#include <algorithm>
#include <cstring>

namespace flashtrie {

void Stream::spill(TempFile& file) {
  if (tail_.empty()) return;
  const uint64_t offset = file.append(tail_.data(), tail_.size());
  if (!segments_.empty() && segments_.back().offset + segments_.back().size == offset)
    segments_.back().size += tail_.size();
  else
    segments_.push_back({offset, tail_.size()});
  spilled_ += tail_.size();
  std::vector<uint8_t>().swap(tail_);
}

void Stream::read(const TempFile& file, const std::function<void(const uint8_t*, size_t)>& sink) const {
  constexpr size_t kStep = 1 << 18;
  std::vector<uint8_t> buffer;
  for (const Segment& segment : segments_) {
    for (uint64_t at = 0; at < segment.size; at += kStep) {
      const size_t size = static_cast<size_t>(std::min<uint64_t>(kStep, segment.size - at));
      buffer.resize(size);
      file.read(segment.offset + at, buffer.data(), size);
      sink(buffer.data(), size);
    }
  }
  if (!tail_.empty()) sink(tail_.data(), tail_.size());
}

void BitStream::read(const TempFile& file, BitJoiner& joiner) const {
  words_.read(file, [&](const uint8_t* data, size_t size) {
    for (size_t at = 0; at < size; at += 8) {
      uint64_t word;
      memcpy(&word, data + at, 8);
      joiner.put(word, 64);
    }
  });
  if (num_bits_ % 64) joiner.put(word_, static_cast<int>(num_bits_ % 64));
}

}  // namespace flashtrie
