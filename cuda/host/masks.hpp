// Opened token masks on the CPU: fill, advance and the batched forms of both.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flashtrie/masks.cuh"

namespace flashtrie {

constexpr uint32_t kMaskWordBits = 32;

inline void set_bit(uint32_t* row, uint32_t token) { row[token / kMaskWordBits] |= uint32_t(1) << (token % kMaskWordBits); }

// What is wrong with the arrays (sizes as in MaskView, `num_rows` and `num_entries` as stored), or null.
// Every later read is inside the arrays if nothing is.
const char* find_mask_flaw(const MaskView& masks, uint64_t num_rows, uint64_t num_entries);

// The masks with a dense copy of the few rows that are long.
class MaskSet {
 public:
  explicit MaskSet(const MaskView& masks);

  const MaskView& view() const { return masks_; }
  uint32_t num_words() const { return num_words_; }
  uint32_t ended() const { return masks_.num_nodes; }
  size_t num_long() const { return num_long_; }  // nodes whose lists are long enough for a dense row
  const std::vector<uint32_t>& dense_nodes() const { return dense_nodes_; }
  const std::vector<uint32_t>& dense_words() const { return dense_words_; }

  // Writes all num_words() of the state's row.
  void fill(uint32_t state, uint32_t* row) const;

  // Allowed ids of a state, end-of-sequence ids included, ascending, appended to `out`.
  void append_allowed(uint32_t state, std::vector<uint32_t>& out) const;
  uint32_t count_allowed(uint32_t state) const;

  // states[i] becomes the state after tokens[i] where allowed[i] turns out true, and stays elsewhere.
  void advance_each(uint32_t* states, const int64_t* tokens, bool* allowed, size_t count) const;

  // The state after each row of tokens [count, length] from the root. A token that is not allowed gives
  // `kRejected`, which stays; what follows an end-of-sequence token leaves the state at ended().
  void walk_each(const int64_t* tokens, size_t count, size_t length, size_t stride, uint32_t* states) const;

 private:
  friend class MaskRows;
  size_t dense_index(uint32_t state) const;  // of the dense rows; their number for a state without one
  const uint32_t* copied_row(uint32_t state, EntryRange range) const;
  void set_bits(EntryRange range, uint32_t* row) const;
  void clear_bits(uint32_t state, uint32_t* row) const;
  void prefetch_row(uint32_t state) const;

  MaskView masks_;
  uint32_t num_words_;
  size_t num_long_;
  std::vector<uint32_t> dense_nodes_;  // ascending
  std::vector<uint32_t> dense_words_;  // num_words_ a node
};

}  // namespace flashtrie
