#include "mask_rows.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace flashtrie {
namespace {

// States looked up together, and of those listed together, so that their cache misses overlap.
constexpr size_t kChunk = 256, kGroup = 32;
constexpr size_t kClearAhead = 64;
// Tokens that are listed without a branch for each: as many as most states have, and what is none is written over.
constexpr uint32_t kStraight = 4;
// Lists longer than this are set row by row where no states share rows: their words fill the caches anyway.
constexpr uint32_t kLongList = 32;
constexpr uint32_t kLineEntries = 16;  // of a cache line
// Rows of a batch for each spare row: of 256 states of random walks through 100,000 names 11 have such lists.
constexpr size_t kRowsPerSpare = 16;
constexpr uint32_t kEndList = 256, kNoList = 257;  // behind the lists of the bytes
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

// The words of a row that begins at word `base`, and the tokens.
inline void list_tokens(const uint32_t* values, uint32_t count, int32_t shift, uint32_t base, uint32_t* words,
                        uint32_t* tokens) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t token = values[i] >> shift;
    words[i] = base + token / kMaskWordBits;
    tokens[i] = token;
  }
}

// All that is read before anything is written, so that it is done in vectors.
inline void list_straight(const uint32_t* values, int32_t shift, uint32_t base, uint32_t* words, uint32_t* tokens) {
  uint32_t listed[kStraight];
  for (uint32_t i = 0; i < kStraight; ++i) listed[i] = values[i] >> shift;
  for (uint32_t i = 0; i < kStraight; ++i) words[i] = base + listed[i] / kMaskWordBits;
  for (uint32_t i = 0; i < kStraight; ++i) tokens[i] = listed[i];
}

}  // namespace

void MaskRows::WordList::append_rows(const WordList& other, size_t first) {
  const size_t from = other.begins_[first], count = other.begins_.back() - from, size = begins_[first];
  if (size + count > room()) make_room(size + count);
  std::copy_n(other.words_.begin() + from, count, words_.begin() + size);
  for (size_t row = first; row + 1 < begins_.size(); ++row) end_row(row, other.begins_[row + 1] - from + size);
}

void MaskRows::WordList::clear() { std::fill(begins_.begin(), begins_.end(), 0); }

MaskRows::MaskRows(const MaskSet& masks, size_t num_rows)
    : masks_(masks), words_(checked_size(masks, num_rows)), shown_(num_rows), fresh_(num_rows), long_(num_rows),
      spare_(num_spare(masks, num_rows)), num_entries_(row_word(masks.view().rows, masks.view().num_nodes)) {
  const MaskView& view = masks_.view();
  const uint32_t* const begins = view.bytes.begins;
  for (uint32_t byte = 0; byte < 256; ++byte) extras_.push_back({begins[byte], begins[byte + 1] - begins[byte]});
  extras_.push_back({begins[256], view.num_eos});
  extras_.push_back({begins[256] + view.num_eos, 0});
  for (const Extra extra : extras_) most_extra_ = std::max(most_extra_, extra.count);
  extra_tokens_.assign(view.bytes.tokens, view.bytes.tokens + begins[256]);
  extra_tokens_.insert(extra_tokens_.end(), view.eos, view.eos + view.num_eos);
  extra_tokens_.insert(extra_tokens_.end(), kStraight, 0);  // read beyond a list's end
  forget();
}

void MaskRows::forget() {
  std::fill(words_.data(), words_.data() + words_.size(), 0);
  std::copy(masks_.dense_words().begin(), masks_.dense_words().end(), row_at(num_rows()));
  std::fill(long_.begin(), long_.end(), kNoState);
  shown_.clear();
  for (std::vector<uint32_t>& words : spare_) words.clear();
}

// For so many words and tokens: the two grow together.
void MaskRows::make_room(size_t size) {
  tokens_.resize(size);
  fresh_.make_room(size);
}

// Reads the nodes' rows, all of them asked for before, and asks for their lists.
void MaskRows::ask_for(const uint32_t* states, size_t count, RowParts* parts) const {
  const MaskView& view = masks_.view();
  for (size_t i = 0; i < count; ++i) masks_.prefetch_row(states[i]);
  for (size_t i = 0; i < count; ++i) {
    parts[i] = {row_word(view.rows, states[i]), view.rows[size_t(states[i]) * kRowHalves + 2]};
    __builtin_prefetch(view.entries + (parts[i].word & kEntryBits));
  }
}

// Shows a state with a long list, each row for itself.
void MaskRows::show_long(size_t row, uint32_t state, EntryRange range) {
  if (long_[row] == state) return;
  if (const uint32_t* const copied = masks_.copied_row(state, range)) {
    memcpy(row_at(row), copied, masks_.num_words() * sizeof(uint32_t));
  } else {
    clear_long(row);
    masks_.set_bits(range, row_at(row));
  }
  long_[row] = state;
}

void MaskRows::clear_long(size_t row) {
  if (long_[row] == kNoState) return;
  masks_.clear_bits(long_[row], row_at(row));
  long_[row] = kNoState;
}

// Whether a state with a long list needs no listing: it is set row by row, or shown by a row behind the batch's.
bool MaskRows::show_elsewhere(size_t row, uint32_t state, int32_t* at) {
  const EntryRange range = entry_range(masks_.view(), state);
  if (at == nullptr) {
    show_long(row, state, range);
    return true;
  }
  const size_t dense = masks_.dense_index(state);
  if (dense == num_dense() && waiting_.size() == spare_.size()) return false;
  at[row] = static_cast<int32_t>(num_rows() + dense + (dense == num_dense() ? waiting_.size() : 0));
  if (dense < num_dense()) return true;
  waiting_.push_back(state);
  for (uint32_t entry = range.first; entry < range.last; entry += kLineEntries)
    __builtin_prefetch(masks_.view().entries + entry);
  return true;
}

// The words are in the caches, so nothing is asked for; the lists were when they began to wait.
void MaskRows::set_spare_rows() {
  const MaskView& view = masks_.view();
  const int32_t hop_bits = view.hop_bits;
  for (size_t i = 0; i < waiting_.size(); ++i) {
    uint32_t* const row = row_at(num_rows() + num_dense() + i);
    for (const uint32_t word : spare_[i]) row[word] = 0;
    const EntryRange range = entry_range(view, waiting_[i]);
    const ByteRange bytes = byte_range(view, range);
    spare_[i].resize(range.count() + bytes.count() + (range.terminal ? view.num_eos : 0));
    uint32_t* word = spare_[i].data();
    const auto set = [row, &word](uint32_t token) {
      *word = token / kMaskWordBits;
      row[*word++] |= uint32_t(1) << (token % kMaskWordBits);
    };
    for (uint32_t entry = range.first; entry < range.last; ++entry) set(view.entries[entry] >> hop_bits);
    for (uint32_t at = bytes.first; at < bytes.last; ++at) set(view.bytes.tokens[at]);
    for (uint32_t at = 0; range.terminal && at < view.num_eos; ++at) set(view.eos[at]);
  }
  waiting_.clear();
}

// What listing needs, by value: what a loop writes can then not be what it reads.
struct MaskRows::Lister {
  const uint32_t* entries;
  const Extra* extras;
  const uint32_t* extra_tokens;
  uint32_t num_entries;
  int32_t hop_bits;

  // The words of a state and its tokens, as many as it answers; up to kStraight more are scribbled on.
  uint32_t list(RowParts row, uint32_t count, uint32_t base, uint32_t* words, uint32_t* tokens) const {
    const uint32_t first = row.word & kEntryBits;
    const bool is_inside = first + kStraight <= num_entries;
    if (is_inside) list_straight(entries + first, hop_bits, base, words, tokens);
    if (count > kStraight || !is_inside) list_tokens(entries + first, count, hop_bits, base, words, tokens);
    uint32_t which = (row.word & kTerminalBit) != 0 ? kEndList : kNoList;
    if ((row.word & kSingleBit) != 0) which = row.rest & 255;
    const Extra extra = extras[which];
    const uint32_t* const more = extra_tokens + extra.first;
    list_straight(more, 0, base, words + count, tokens + count);
    if (extra.count > kStraight) list_tokens(more, extra.count, 0, base, words + count, tokens + count);
    return count + extra.count;
  }
};

// Lists the words of rows [begin, end) behind the first `size` and asks for them; answers how many there are then.
size_t MaskRows::list_group(const uint32_t* states, const RowParts* parts, size_t begin, size_t end, int32_t* at,
                            size_t size) {
  const MaskView& view = masks_.view();
  const Lister lister{view.entries, extras_.data(), extra_tokens_.data(), num_entries_, view.hop_bits};
  const uint32_t num_words = masks_.num_words(), most_extra = most_extra_;
  uint32_t *fresh = fresh_.data(), *tokens = tokens_.data();
  size_t room = fresh_.room();
  const size_t before = size;
  for (size_t row = begin; row < end; ++row) {
    const RowParts part = parts[row - begin];
    uint32_t count = part.rest >> 8;
    if (at != nullptr) at[row] = static_cast<int32_t>(row);
    if (count > kLongList) {
      if (show_elsewhere(row, states[row], at)) {
        fresh_.end_row(row, size);
        continue;
      }
      count = entry_range(view, states[row]).count();
    }
    clear_long(row);
    if (size + count + most_extra + kStraight > room) {
      room = 2 * (size + count + most_extra + kStraight);
      make_room(room);
      fresh = fresh_.data(), tokens = tokens_.data();
    }
    size += lister.list(part, count, static_cast<uint32_t>(row) * num_words, fresh + size, tokens + size);
    fresh_.end_row(row, size);
  }
  for (size_t i = before; i < size; ++i) __builtin_prefetch(words_.data() + fresh[i], 1);
  return size;
}

// Three loops over all rows, because the words lie apart from one another and each is a cache miss: those that are
// shown are cleared, the new ones listed and asked for, and then set. No branch waits for any of them.
void MaskRows::show(const uint32_t* states, size_t count, int32_t* at) {
  uint32_t* const words = words_.data();
  clear(words, shown_.data(), shown_.begin(count));
  make_room(std::max(fresh_.room(), tokens_.size()));
  RowParts parts[kChunk];
  size_t size = 0;
  for (size_t begin = 0; begin < count; begin += kGroup) {
    if (begin % kChunk == 0) ask_for(states + begin, std::min(kChunk, count - begin), parts);
    size = list_group(states, parts + begin % kChunk, begin, std::min(count, begin + kGroup), at, size);
  }
  set_spare_rows();
  const uint32_t *const fresh = fresh_.data(), *const tokens = tokens_.data();
  for (size_t i = 0; i < size; ++i) words[fresh[i]] |= uint32_t(1) << (tokens[i] % kMaskWordBits);
  if (count < num_rows()) fresh_.append_rows(shown_, count);
  std::swap(shown_, fresh_);
}

}  // namespace flashtrie
