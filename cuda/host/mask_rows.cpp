#include "mask_rows.hpp"

#include <algorithm>
#include <cstring>

namespace flashtrie {
namespace {

// States looked at together, so that their cache misses overlap.
constexpr size_t kGroup = 32;
// Tokens that are listed without a branch for each: as many as most states have, and what is none is written over.
constexpr uint32_t kStraight = 4;
// Lists longer than this are set row by row where no states share rows: their words fill the caches anyway.
constexpr uint32_t kLongList = 32;
constexpr uint32_t kEndList = 256, kNoList = 257;  // behind the lists of the bytes
constexpr uint32_t kNoState = kRejected;

}  // namespace

uint64_t* MaskRows::BitList::make_room(size_t row, size_t count) {
  const size_t end = begins_[row] + count;
  if (end > bits_.size()) bits_.resize(2 * end);
  return bits_.data() + begins_[row];
}

void MaskRows::BitList::append_rows(const BitList& other, size_t first) {
  for (size_t row = first; row + 1 < begins_.size(); ++row) {
    const size_t count = other.begins_[row + 1] - other.begins_[row];
    std::copy_n(other.begin(row), count, make_room(row, count));
    end_row(row, count);
  }
}

void MaskRows::BitList::clear() { std::fill(begins_.begin(), begins_.end(), 0); }

MaskRows::MaskRows(const MaskSet& masks, size_t num_rows)
    : masks_(masks), words_((num_rows + masks.dense_nodes().size()) * masks.num_words()), shown_(num_rows), fresh_(num_rows), long_(num_rows),
      num_entries_(row_word(masks.view().rows, masks.view().num_nodes)) {
  const MaskView& view = masks_.view();
  const uint32_t num_of_bytes = view.bytes.begins[256];
  extra_begins_.assign(view.bytes.begins, view.bytes.begins + 257);
  extra_begins_.insert(extra_begins_.end(), 2, num_of_bytes + view.num_eos);
  extra_tokens_.assign(view.bytes.tokens, view.bytes.tokens + num_of_bytes);
  extra_tokens_.insert(extra_tokens_.end(), view.eos, view.eos + view.num_eos);
  extra_tokens_.insert(extra_tokens_.end(), kStraight, 0);  // read beyond a list's end
  forget();
}

void MaskRows::forget() {
  uint32_t* const shared = row_at(num_rows());
  std::fill(words_.data(), shared, 0);
  if (num_shared() > 0) memcpy(shared, masks_.dense_words().data(), masks_.dense_words().size() * sizeof(uint32_t));
  std::fill(long_.begin(), long_.end(), kNoState);
  shown_.clear();
}

// The tokens of a state, as bits of its row, behind those of the rows before.
void MaskRows::list_bits(size_t row, EntryRange range) {
  const MaskView& view = masks_.view();
  const uint32_t list = range.single ? range.byte : range.terminal ? kEndList : kNoList;
  const uint32_t begin = extra_begins_[list], num_extra = extra_begins_[list + 1] - begin, count = range.count();
  const uint64_t base = uint64_t(row) * masks_.num_words() * kMaskWordBits;
  const uint32_t* const entries = view.entries + range.first;
  const int32_t hop_bits = view.hop_bits;
  uint64_t* out = fresh_.make_room(row, count + num_extra + 2 * kStraight);
  uint32_t listed = 0;
  if (range.first + kStraight <= num_entries_)
    for (; listed < kStraight; ++listed) out[listed] = base + (entries[listed] >> hop_bits);
  for (; listed < count; ++listed) out[listed] = base + (entries[listed] >> hop_bits);
  out += count;
  const uint32_t* const extras = extra_tokens_.data() + begin;
  for (listed = 0; listed < kStraight; ++listed) out[listed] = base + extras[listed];
  for (; listed < num_extra; ++listed) out[listed] = base + extras[listed];
  fresh_.end_row(row, count + num_extra);
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

// Three loops over all rows, because the words lie apart from one another and each is a cache miss: those that are
// shown are cleared, the new ones listed and asked for, and then set. No branch waits for any of them.
void MaskRows::show(const uint32_t* states, size_t count, int32_t* at) {
  const MaskView& view = masks_.view();
  uint32_t* const words = words_.data();
  const uint64_t* const last_shown = shown_.begin(count);
  for (const uint64_t* bit = shown_.begin(0); bit < last_shown; ++bit) words[*bit / kMaskWordBits] = 0;
  EntryRange ranges[kGroup];
  for (size_t begin = 0; begin < count; begin += kGroup) {
    const size_t end = std::min(count, begin + kGroup);
    for (size_t i = begin; i < end; ++i) masks_.prefetch_row(states[i]);
    for (size_t i = begin; i < end; ++i) {
      ranges[i - begin] = entry_range(view, states[i]);
      __builtin_prefetch(view.entries + ranges[i - begin].first);
    }
    for (size_t i = begin; i < end; ++i) {
      const EntryRange range = ranges[i - begin];
      const uint32_t* const dense = at == nullptr ? nullptr : masks_.dense_row(states[i], range);
      if (at != nullptr) at[i] = static_cast<int32_t>(dense == nullptr ? i : num_rows() + masks_.number_of(dense));
      const bool is_long = at == nullptr && range.count() > kLongList;
      if (dense != nullptr || is_long) {
        if (dense == nullptr) show_long(i, states[i], range);
        fresh_.end_row(i, 0);
        continue;
      }
      clear_long(i);
      list_bits(i, range);
    }
    const uint64_t* const last = fresh_.begin(end);
    for (const uint64_t* bit = fresh_.begin(begin); bit < last; ++bit) __builtin_prefetch(words + *bit / kMaskWordBits, 1);
  }
  const uint64_t* const last = fresh_.begin(count);
  for (const uint64_t* bit = fresh_.begin(0); bit < last; ++bit) words[*bit / kMaskWordBits] |= uint32_t(1) << (*bit % kMaskWordBits);
  if (count < num_rows()) fresh_.append_rows(shown_, count);
  std::swap(shown_, fresh_);
}

}  // namespace flashtrie
