#include "mask_rows.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace flashtrie {
namespace {

// Of a chunk's states those listed together, so that the cache misses of their words overlap.
constexpr size_t kGroup = 32;
constexpr size_t kClearAhead = 64;
// Tokens that are listed without a branch for each: as many as most states have, and what is none is written over.
constexpr uint32_t kStraight = 4;
// Lists longer than this are set row by row where no states share rows: their words fill the caches anyway.
constexpr uint32_t kLongList = 32;
constexpr uint32_t kLineEntries = 16;  // of a cache line
// Equal states with lists longer than this share a row: looking for them costs less than it saves where few are equal, too.
constexpr uint32_t kSharedLength = 16;
// Rows of a batch for each spare row: of 256 states of random walks through 100,000 names 11 have such lists.
constexpr size_t kRowsPerSpare = 16;
constexpr uint32_t kNoState = kRejected;

size_t num_spare(const MaskSet& masks, size_t num_rows) {
  return masks.dense_nodes().size() < masks.num_long() ? num_rows / kRowsPerSpare : 0;
}

size_t checked_size(const MaskSet& masks, size_t num_rows) {
  const size_t most = INT32_MAX / masks.num_words(), behind = masks.dense_nodes().size() + num_spare(masks, num_rows);
  if (num_rows > most || behind > most - num_rows) throw std::length_error("mask rows of more than 2^31 - 1 words");
  return (num_rows + behind) * masks.num_words();
}

// Stores wait for one another's cache misses, so lines are asked for some way ahead.
inline void clear(uint32_t* words, const uint32_t* places, size_t count) {
  size_t i = 0;
  for (; i + kClearAhead < count; ++i) {
    __builtin_prefetch(words + places[i + kClearAhead], 1);
    words[places[i]] = 0;
  }
  for (; i < count; ++i) words[places[i]] = 0;
}

// The words of a row that begins at word `base`, and the tokens. All that is read before anything is written, so that it
// is done in vectors.
inline void list_straight(const uint32_t* values, int32_t shift, uint32_t base, uint32_t* words, uint32_t* tokens) {
  uint32_t listed[kStraight];
  for (uint32_t i = 0; i < kStraight; ++i) listed[i] = values[i] >> shift;
  for (uint32_t i = 0; i < kStraight; ++i) words[i] = base + listed[i] / kMaskWordBits;
  for (uint32_t i = 0; i < kStraight; ++i) tokens[i] = listed[i];
}

// Reads and writes up to kStraight - 1 more.
template <bool kOneBlock>
inline void list_blocks(const uint32_t* values, uint32_t count, int32_t shift, uint32_t base, uint32_t* words,
                        uint32_t* tokens) {
  list_straight(values, shift, base, words, tokens);
  if (kOneBlock) return;
  for (uint32_t at = kStraight; at < count; at += kStraight) list_straight(values + at, shift, base, words + at, tokens + at);
}

// The last lists, beyond which nothing may be read.
__attribute__((noinline)) void list_exactly(const uint32_t* values, uint32_t count, int32_t shift, uint32_t base,
                                            uint32_t* words, uint32_t* tokens) {
  for (uint32_t i = 0; i < count; ++i) {
    tokens[i] = values[i] >> shift;
    words[i] = base + tokens[i] / kMaskWordBits;
  }
}

}  // namespace

MaskRows::MaskRows(const MaskSet& masks, size_t num_rows)
    : masks_(masks), words_(checked_size(masks, num_rows)), long_(num_rows), num_spare_(num_spare(masks, num_rows)),
      num_entries_(row_word(masks.view().rows, masks.view().num_nodes)) {
  keep_extras();
  forget();
}

void MaskRows::keep_extras() {
  const MaskView& view = masks_.view();
  const uint32_t* const begins = view.bytes.begins;
  constexpr uint32_t kEnd = kTerminalBit >> 30, kSingle = kSingleBit >> 30;
  for (uint32_t bits = 0; bits < 4; ++bits) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      Extra extra{0, 0};
      if (bits == kEnd) extra = {begins[256], view.num_eos};
      if (bits & kSingle) extra = {begins[byte], begins[byte + 1] - begins[byte]};
      extras_.push_back(extra);
      most_extra_ = std::max(most_extra_, extra.count);
    }
  }
  extra_tokens_.assign(view.bytes.tokens, view.bytes.tokens + begins[256]);
  extra_tokens_.insert(extra_tokens_.end(), view.eos, view.eos + view.num_eos);
  extra_tokens_.insert(extra_tokens_.end(), kStraight, 0);  // read beyond a list's end
}

void MaskRows::forget() {
  std::fill(words_.data(), words_.data() + words_.size(), 0);
  std::copy(masks_.dense_words().begin(), masks_.dense_words().end(), row_at(num_rows()));
  std::fill(long_.begin(), long_.end(), kNoState);
  has_long_ = false;
  num_shown_ = 0;
}

// Rows [0, count) and the spare ones. The words of the others come first then.
void MaskRows::clear_shown(size_t count) {
  size_t kept = 0;
  if (count < num_rows()) {
    const uint32_t first = static_cast<uint32_t>(count) * masks_.num_words();
    const uint32_t num_left = static_cast<uint32_t>(num_rows() - count) * masks_.num_words();
    const auto is_left = [first, num_left](uint32_t word) { return word - first < num_left; };
    kept = std::partition(shown_.begin(), shown_.begin() + num_shown_, is_left) - shown_.begin();
  }
  clear(words_.data(), shown_.data() + kept, num_shown_ - kept);
  num_shown_ = kept;
}

// Rows with a long list that will show another state.
void MaskRows::clear_long(const uint32_t* states, size_t count) {
  for (size_t row = 0; row < count; ++row) {
    if (long_[row] == kNoState || long_[row] == states[row]) continue;
    masks_.clear_bits(long_[row], row_at(row));
    long_[row] = kNoState;
  }
}

// Each row for itself.
void MaskRows::show_long(size_t row, uint32_t state) {
  if (long_[row] == state) return;
  const EntryRange range = entry_range(masks_.view(), state);
  if (const uint32_t* const copied = masks_.copied_row(state, range))
    memcpy(row_at(row), copied, masks_.num_words() * sizeof(uint32_t));
  else
    masks_.set_bits(range, row_at(row));
  long_[row] = state;
  has_long_ = true;
}

// Reads the nodes' rows, all of them asked for before, and asks for their lists. States with few entries are told from
// those with more without a branch, which would be foretold wrongly for one in four.
void MaskRows::read_chunk(const uint32_t* states, size_t begin, size_t count, Chunk& chunk) const {
  const MaskView& view = masks_.view();
  states += begin;
  for (size_t i = 0; i < count; ++i) masks_.prefetch_row(states[i]);
  size_t num_few = 0, num_more = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t word = row_word(view.rows, states[i]), rest = view.rows[size_t(states[i]) * kRowHalves + 2];
    const Listed listed{word & kEntryBits, rest >> 8, word >> 30 << 8 | (rest & 255), static_cast<uint32_t>(begin + i)};
    __builtin_prefetch(view.entries + listed.first);
    chunk.few[num_few] = chunk.more[num_more] = listed;
    num_few += listed.count <= kStraight;
    num_more += listed.count > kStraight;
  }
  chunk.num_few = num_few;
  chunk.num_more = num_more;
}

// Whether an equal state before it has a row, which shows this one too.
inline bool MaskRows::is_seen(const uint32_t* states, uint32_t row, int32_t* at) {
  const uint32_t state = states[row];
  uint32_t& seen = seen_[state * 0x9e3779b1u >> (32 - kSeenBits)];
  if (seen < row && states[seen] == state) {
    at[row] = at[seen];
    return true;
  }
  seen = row;
  return false;
}

// Short lists first, while the others, all of whose lines are asked for, come. Long ones go to spare rows while there are any.
void MaskRows::list_chunk(const uint32_t* states, Chunk& chunk, int32_t* at) {
  const MaskView& view = masks_.view();
  Listed long_lists[kChunk];
  size_t num_medium = 0, num_long = 0;
  for (size_t i = 0; i < chunk.num_more; ++i) {
    Listed node = chunk.more[i];
    if (at != nullptr && node.count > kSharedLength && is_seen(states, node.row, at)) continue;
    if (node.count <= kLongList) {
      __builtin_prefetch(view.entries + node.first + node.count - 1);
      chunk.more[num_medium++] = node;
      continue;
    }
    const uint32_t row = node.row, state = states[row];
    if (at == nullptr) {
      waiting_.push_back(row);
      continue;
    }
    const size_t dense = masks_.dense_index(state);
    if (dense < num_dense()) {
      at[row] = static_cast<int32_t>(num_rows() + dense);
      continue;
    }
    if (num_used_ < num_spare_) node.row = static_cast<uint32_t>(num_rows() + num_dense() + num_used_++);
    at[row] = static_cast<int32_t>(node.row);
    node.count = entry_range(view, state).count();
    for (uint32_t i = 0; i < node.count; i += kLineEntries) __builtin_prefetch(view.entries + node.first + i);
    long_lists[num_long++] = node;
  }
  list<Length::few>(chunk.few, chunk.num_few);
  list<Length::medium>(chunk.more, num_medium);
  list<Length::long_>(long_lists, num_long);
}

// For so many more words and tokens.
void MaskRows::make_room(size_t count) {
  if (num_shown_ + count <= shown_.size()) return;
  shown_.resize(2 * (num_shown_ + count));
  tokens_.resize(shown_.size());
}

// Lists words and tokens behind those before, and asks for the words: not for those of long lists, which share lines, and
// whose rows stay in the caches.
template <MaskRows::Length length>
void MaskRows::list(const Listed* listed, size_t num_listed) {
  const MaskView& view = masks_.view();
  const uint32_t num_words = masks_.num_words(), num_entries = num_entries_;
  const uint32_t* const entries = view.entries;
  const Extra* const extras = extras_.data();
  const uint32_t* const extra_tokens = extra_tokens_.data();
  const int32_t hop_bits = view.hop_bits;
  for (size_t begin = 0; begin < num_listed; begin += kGroup) {
    const size_t end = std::min(num_listed, begin + kGroup), before = num_shown_;
    size_t most = kGroup * (most_extra_ + kStraight);
    for (size_t i = begin; i < end; ++i) most += listed[i].count;
    make_room(most);
    uint32_t *words = shown_.data() + before, *tokens = tokens_.data() + before;
    for (size_t i = begin; i < end; ++i) {
      const Listed node = listed[i];
      const uint32_t base = node.row * num_words;
      if (node.first + node.count + kStraight <= num_entries)
        list_blocks<length == Length::few>(entries + node.first, node.count, hop_bits, base, words, tokens);
      else
        list_exactly(entries + node.first, node.count, hop_bits, base, words, tokens);
      words += node.count, tokens += node.count;
      const Extra extra = extras[node.extra];
      const uint32_t* const more = extra_tokens + extra.first;
      list_blocks<false>(more, extra.count, 0, base, words, tokens);
      words += extra.count, tokens += extra.count;
    }
    num_shown_ = words - shown_.data();
    if (length != Length::long_)
      for (size_t i = before; i < num_shown_; ++i) __builtin_prefetch(words_.data() + shown_[i], 1);
  }
}

// Loops over all rows, because the words lie apart from one another and each is a cache miss: those that are shown are
// cleared, the new ones listed and asked for, and then set. No branch waits for any of them.
void MaskRows::show(const uint32_t* states, size_t count, int32_t* at) {
  clear_shown(count);
  if (has_long_) clear_long(states, count);
  if (at != nullptr) std::iota(at, at + count, 0);
  const size_t before = num_shown_;
  num_used_ = 0;
  for (size_t begin = 0; begin < count; begin += kChunk) {
    Chunk chunk;
    read_chunk(states, begin, std::min(kChunk, count - begin), chunk);
    list_chunk(states, chunk, at);
  }
  uint32_t* const words = words_.data();
  const uint32_t *const shown = shown_.data(), *const tokens = tokens_.data();
  for (size_t i = before; i < num_shown_; ++i) words[shown[i]] |= uint32_t(1) << (tokens[i] % kMaskWordBits);
  for (const uint32_t row : waiting_) show_long(row, states[row]);  // copies, which drive others out of the caches
  waiting_.clear();
}

}  // namespace flashtrie
