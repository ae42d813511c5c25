// A batch of mask rows that follows a batch of states.
#pragma once
#include "huge_words.hpp"
#include "masks.hpp"

namespace flashtrie {

// A bitmask [num_rows, num_words] that remembers the words in which its rows are not zero. A fill clears those
// and sets the new ones; it touches no others. Behind these rows stand the dense rows, which never change and which
// states may share.
class MaskRows {
 public:
  MaskRows(const MaskSet& masks, size_t num_rows);
  void fill(const uint32_t* states, size_t count) { show(states, count, nullptr); }  // rows [0, count)
  // The same, but a state with a dense row is shown by that one, nothing copied: at[i] is the row of state i.
  void share(const uint32_t* states, size_t count, int32_t* at) { show(states, count, at); }
  void forget();  // the caller wrote into the rows: clear them all

  uint32_t* words() { return words_.data(); }
  size_t num_rows() const { return long_.size(); }
  size_t num_shared() const { return masks_.dense_nodes().size(); }

 private:
  // The bits that stand for the tokens of states, counted from the first row's first, in the order of the rows.
  class BitList {
   public:
    explicit BitList(size_t num_rows) : begins_(num_rows + 1, 0) {}
    const uint64_t* begin(size_t row) const { return bits_.data() + begins_[row]; }
    uint64_t* make_room(size_t row, size_t count);  // for the row behind those that are there
    void end_row(size_t row, size_t count) { begins_[row + 1] = begins_[row] + count; }
    void append_rows(const BitList& other, size_t first);  // from `first` on, which is the next
    void clear();

   private:
    std::vector<uint64_t> bits_;
    std::vector<size_t> begins_;
  };

  void show(const uint32_t* states, size_t count, int32_t* at);
  void list_bits(size_t row, EntryRange range);
  void show_long(size_t row, uint32_t state, EntryRange range);
  void clear_long(size_t row);

  uint32_t* row_at(size_t row) { return words_.data() + row * masks_.num_words(); }

  const MaskSet& masks_;
  HugeWords words_;
  BitList shown_, fresh_;
  std::vector<uint32_t> long_;  // the state of each row that shows a long list, which is not in shown_; or kNoState
  // The tokens of single bytes, then the ends; list b of extra_tokens_ begins at extra_begins_[b].
  std::vector<uint32_t> extra_begins_, extra_tokens_;
  uint32_t num_entries_;
};

}  // namespace flashtrie
