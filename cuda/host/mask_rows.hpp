// A batch of mask rows that follows a batch of states.
#pragma once
#include "huge_words.hpp"
#include "masks.hpp"

namespace flashtrie {

// A bitmask [num_rows, num_words] that remembers the words in which its rows are not zero. A fill clears those
// and sets the new ones; it touches no others. Behind these rows stand those that `share` has for long lists: the dense
// rows, which never change and which states share, and spare rows, one for sixteen of the batch, for lists without a dense
// row. Being few, those stay in the caches, where long lists all over the batch's rows would not.
class MaskRows {
 public:
  MaskRows(const MaskSet& masks, size_t num_rows);  // std::length_error for 2^31 words and more
  void fill(const uint32_t* states, size_t count) { show(states, count, nullptr); }  // rows [0, count)
  // The same, but a state with a long list may be shown by a row behind the batch's: at[i] is the row of state i.
  void share(const uint32_t* states, size_t count, int32_t* at) { show(states, count, at); }
  void forget();  // the caller wrote into the rows: clear them all

  uint32_t* words() { return words_.data(); }
  size_t num_rows() const { return long_.size(); }
  size_t num_behind() const { return num_dense() + spare_.size(); }

 private:
  // Words of the rows, counted from the first row's first, in the order of the rows.
  class WordList {
   public:
    explicit WordList(size_t num_rows) : begins_(num_rows + 1, 0) {}
    uint32_t* data() { return words_.data(); }
    size_t room() const { return words_.size(); }
    void make_room(size_t size) { words_.resize(size); }
    size_t begin(size_t row) const { return begins_[row]; }
    void end_row(size_t row, size_t end) { begins_[row + 1] = end; }
    void append_rows(const WordList& other, size_t first);  // from `first` on, which is the next
    void clear();

   private:
    std::vector<uint32_t> words_;
    std::vector<size_t> begins_;
  };

  // Where a node's entries begin, its two bits and what else its row says: copied out of it for a group of states.
  struct RowParts {
    uint32_t word, rest;
  };

  // Tokens that are no entries: of extra_tokens_.
  struct Extra {
    uint32_t first, count;
  };

  struct Lister;

  size_t num_dense() const { return masks_.dense_nodes().size(); }
  void show(const uint32_t* states, size_t count, int32_t* at);
  void ask_for(const uint32_t* states, size_t count, RowParts* parts) const;
  size_t list_group(const uint32_t* states, const RowParts* parts, size_t begin, size_t end, int32_t* at, size_t size);
  bool show_elsewhere(size_t row, uint32_t state, int32_t* at);
  void make_room(size_t size);
  void set_spare_rows();
  void show_long(size_t row, uint32_t state, EntryRange range);
  void clear_long(size_t row);

  uint32_t* row_at(size_t row) { return words_.data() + row * masks_.num_words(); }

  const MaskSet& masks_;
  HugeWords words_;
  WordList shown_, fresh_;                    // those that are not zero; those that a fill sets
  std::vector<uint32_t> tokens_;              // whose bits fresh_ are, one a word
  std::vector<uint32_t> long_;                // the state of each row with a long list that is not in shown_; or kNoState
  std::vector<std::vector<uint32_t>> spare_;  // of each spare row the words that are not zero, counted from its first
  std::vector<uint32_t> waiting_;             // the states that spare rows will show, from the first row on
  std::vector<Extra> extras_;                 // of each byte, of a terminal node, of any other
  std::vector<uint32_t> extra_tokens_;
  uint32_t num_entries_, most_extra_ = 0;
};

}  // namespace flashtrie
