// A batch of mask rows that follows a batch of states.
#pragma once
#include <array>

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
  // The same, but row at[i] shows state i: one behind the batch's, or that of an equal state before it, if its list is long.
  void share(const uint32_t* states, size_t count, int32_t* at) { show(states, count, at); }
  void forget();  // the caller wrote into the rows: clear them all

  uint32_t* words() { return words_.data(); }
  size_t num_rows() const { return long_.size(); }
  size_t num_behind() const { return num_dense() + num_spare_; }

 private:
  // States looked up together, so that their cache misses overlap.
  static constexpr size_t kChunk = 256;
  // Places for the states of a batch with longer lists; two that fall together share less.
  static constexpr size_t kSeenBits = 9;

  // A node's entries, what it allows besides (a place of extras_), and the row that shows it.
  struct Listed {
    uint32_t first, count, extra, row;
  };
  struct Chunk {
    size_t num_few = 0, num_more = 0;
    Listed few[kChunk], more[kChunk];
  };
  enum class Length { few, medium, long_ };

  // Tokens that are no entries: of extra_tokens_.
  struct Extra {
    uint32_t first, count;
  };

  size_t num_dense() const { return masks_.dense_nodes().size(); }
  void show(const uint32_t* states, size_t count, int32_t* at);
  void clear_shown(size_t count);
  void clear_long(const uint32_t* states, size_t count);
  void read_chunk(const uint32_t* states, size_t begin, size_t count, Chunk& chunk) const;
  void list_chunk(const uint32_t* states, Chunk& chunk, int32_t* at);
  bool is_seen(const uint32_t* states, uint32_t row, int32_t* at);
  template <Length length>
  void list(const Listed* listed, size_t count);
  void make_room(size_t count);
  void show_long(size_t row, uint32_t state);
  void keep_extras();

  uint32_t* row_at(size_t row) { return words_.data() + row * masks_.num_words(); }

  const MaskSet& masks_;
  HugeWords words_;
  std::vector<uint32_t> shown_;         // the words that are not zero, counted from the first row's first
  std::vector<uint32_t> tokens_;        // whose bits they are, of those that are listed in this call
  size_t num_shown_ = 0;
  std::vector<uint32_t> long_;          // the state of each row with a long list that is not in shown_; or kNoState
  bool has_long_ = false;               // whether there may be such rows
  std::vector<uint32_t> waiting_;       // rows of the batch that will have a long list
  size_t num_spare_, num_used_ = 0;     // spare rows, and those of this call
  // By a state's hash the row of the last such state, maybe of an older call.
  std::array<uint32_t, size_t(1) << kSeenBits> seen_{};
  std::vector<Extra> extras_;           // by a row's two bits and its byte
  std::vector<uint32_t> extra_tokens_;
  uint32_t num_entries_, most_extra_ = 0;
};

}  // namespace flashtrie
