#include "yardstick.hpp"

#include <algorithm>

namespace flashtrie {
namespace {

constexpr int kReads = 4096;
constexpr int kAhead = 32;
constexpr int kRuns = 1024;
constexpr int kRunWords = 4;  // 16 values of 16 bits

uint64_t next(uint64_t& state) {  // xorshift64*
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545f4914f6cdd1dull;
}

}  // namespace

Yardstick::Yardstick(uint64_t table_size) : table_(std::max<uint64_t>(table_size, 4096) / 8), bitmap_(2048) {
  uint64_t state = 7;
  for (uint64_t& word : table_) word = next(state);
  for (uint32_t& word : bitmap_) word = static_cast<uint32_t>(next(state)) & static_cast<uint32_t>(next(state));
}

void Yardstick::gather() {
  gathered_.clear();
  const uint64_t mask = table_.size() - 1;
  uint64_t places[kAhead];
  for (int i = 0; i < kReads; i += kAhead) {
    for (uint64_t& place : places) {
      place = next(state_) & mask;
      __builtin_prefetch(table_.data() + place, 0, 3);
    }
    for (uint64_t place : places) gathered_.push_back(table_[place] ^ (place * 0x9e3779b97f4a7c15ull));
  }
}

void Yardstick::scan() {
  const uint64_t mask = table_.size() - kRunWords;
  uint64_t hits = 0;
  for (int run = 0; run < kRuns; ++run) {
    const uint64_t* words = table_.data() + (gathered_[static_cast<size_t>(run)] & mask);
    for (int i = 0; i < kRunWords; ++i) {
      for (int shift = 0; shift < 64; shift += 16) {
        const uint32_t value = (words[i] >> shift) & 0xffff;
        if ((bitmap_[value >> 5] >> (value & 31)) & 1) hits += gathered_[hits & 1023] & 7;
      }
    }
  }
  state_ ^= hits;
}

void Yardstick::select() {
  const auto quarter = gathered_.begin() + kReads / 4;
  std::nth_element(gathered_.begin(), quarter, gathered_.end());
  std::sort(gathered_.begin(), gathered_.begin() + kReads / 16);
  state_ += *quarter;
}

uint64_t Yardstick::run(uint64_t round) {
  state_ = (round + 1) * 0x9e3779b97f4a7c15ull;
  gather();
  scan();
  select();
  return state_;
}

}  // namespace flashtrie
