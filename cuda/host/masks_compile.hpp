// From a set of strings to its byte trie with token masks, in one pass over the sorted strings.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "flashtrie/masks.cuh"
#include "huge_words.hpp"
#include "vocabulary_automaton.hpp"

namespace flashtrie {

// An array filled from its end towards its front; what was never written is never touched, so a
// generous first guess costs no memory.
template <typename T>
class BackwardArray {
 public:
  // Puts room for `count` values in front and returns it; `spare` more before it may be scribbled on.
  T* grow_front(uint64_t count, uint64_t spare, uint64_t first_guess) {
    if (begin_ < count + spare) regrow(std::max(capacity_ * 2 + count + spare, first_guess));
    begin_ -= count;
    return data_.get() + begin_;
  }
  uint64_t size() const { return capacity_ - begin_; }
  T* begin() { return data_.get() + begin_; }
  const T* begin() const { return data_.get() + begin_; }
  std::unique_ptr<T[]> release() { return std::move(data_); }

 private:
  __attribute__((noinline)) void regrow(uint64_t capacity) {
    std::unique_ptr<T[]> larger(new T[capacity]);  // not initialised
    if (capacity * sizeof(T) >= kLeastHuge) ask_for_huge_pages(larger.get(), capacity * sizeof(T));
    const uint64_t kept = size();
    for (uint64_t i = 0; i < kept; ++i) larger[capacity - kept + i] = data_[begin_ + i];
    data_ = std::move(larger);
    begin_ = capacity - kept;
    capacity_ = capacity;
  }

  // From here on large pages pay: a state's row and list lie anywhere in the arrays.
  static constexpr size_t kLeastHuge = size_t(1) << 22;

  std::unique_ptr<T[]> data_;
  uint64_t capacity_ = 0;
  uint64_t begin_ = 0;
};

// The arrays of a MaskView and what the byte trie itself needs besides.
struct CompiledMasks {
  BackwardArray<uint16_t> rows;  // num_nodes + 2 rows
  BackwardArray<uint32_t> entries;
  std::vector<uint32_t> far_entries;
  std::vector<uint32_t> far_targets;
  uint64_t num_members = 0;      // distinct strings
};

enum class CompileStatus { ok, too_many_nodes, too_many_entries };

constexpr uint64_t kMaxMaskNodes = (uint64_t(1) << 31) - 2;
constexpr uint64_t kMaxMaskEntries = kEntryBits;

// Bits that an entry has left beside a token id below vocab_size.
int hop_bits_for(uint32_t vocab_size);

// `members` may repeat and come in any order; they are sorted in place. The automaton's token ids are below
// vocab_size, which is at most 2^24.
CompileStatus compile_masks(const AutomatonView& automaton, uint32_t vocab_size, std::vector<std::string_view>& members,
                            CompiledMasks& made);

// How a member is spelled before it is compiled.
struct Spelling {
  bool json_quoted = false;   // `"`, the string with JSON's minimal escapes, `"`
  bool prefix_space = false;  // a space first
};
void append_spelled(std::string_view text, const Spelling& spelling, std::vector<char>& out);

}  // namespace flashtrie
