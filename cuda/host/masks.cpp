#include "masks.hpp"

#include <algorithm>
#include <cstring>

namespace flashtrie {
namespace {

// Rows longer than this may get a dense copy, which batches share and the GPU reads.
constexpr uint32_t kDenseLength = 32;
// Of those, rows longer than this are filled by copying it: 16 KiB cost about what setting 250 bits does.
constexpr uint32_t kCopiedLength = 256;
// All dense copies together, so that a large set does not pay for its few hundred long rows in memory; no more than the
// lists take, either.
constexpr size_t kDenseBytes = size_t(1) << 19;
// States looked at together, so that their cache misses overlap.
constexpr size_t kGroup = 32;

bool has_token(const MaskView& masks, ByteRange bytes, uint32_t token) {
  for (uint32_t i = bytes.first; i < bytes.last; ++i)
    if (masks.bytes.tokens[i] == token) return true;
  return false;
}

bool has_sound_bytes(const MaskView& masks) {
  const ByteTokens& bytes = masks.bytes;
  if (bytes.begins[0] != 0 || !std::is_sorted(bytes.begins, bytes.begins + 257)) return false;
  return std::all_of(bytes.tokens, bytes.tokens + bytes.begins[256], [&](uint32_t token) { return token < masks.vocab_size; });
}

const char* find_entry_flaw(const MaskView& masks, uint32_t node, EntryRange range, uint32_t& far_at) {
  const uint32_t far = far_hop(masks.hop_bits);
  if (range.single && (range.terminal || node + 1 == masks.num_nodes)) return "a node without the child that it has";
  const ByteRange bytes = byte_range(masks, range);
  uint32_t previous = 0;
  for (uint32_t entry = range.first; entry < range.last; ++entry) {
    const uint32_t token = entry_token(masks, entry);
    if (token >= masks.vocab_size) return "a token id outside the vocabulary";
    if (entry > range.first && token <= previous) return "tokens of a node that do not ascend";
    previous = token;
    if (has_token(masks, bytes, token)) return "a token that a node has twice";
    const uint32_t hop = masks.entries[entry] & far;
    uint64_t target = uint64_t(node) + hop;
    if (hop == far) {
      if (far_at >= masks.num_far || masks.far_entries[far_at] != entry) return "a far target that is missing";
      target = masks.far_targets[far_at++];
    }
    if (target <= node || target >= masks.num_nodes) return "a token that leads nowhere";
  }
  return nullptr;
}

}  // namespace

const char* find_mask_flaw(const MaskView& masks, uint64_t num_rows, uint64_t num_entries) {
  if (masks.num_nodes == 0 || num_rows != uint64_t(masks.num_nodes) + 2) return "a wrong number of rows";
  if (masks.vocab_size == 0 || masks.hop_bits < 8 || masks.hop_bits > 31) return "an impossible vocabulary size";
  for (uint32_t node = masks.num_nodes; node < num_rows; ++node)
    if (row_word(masks.rows, node) != num_entries || masks.rows[uint64_t(node) * kRowHalves + 2] != 0)
      return "rows that do not cover the entries";
  if (entry_range(masks, 0).first != 0) return "rows that do not begin with the first entry";
  if (!has_sound_bytes(masks)) return "tokens of single bytes outside the vocabulary";
  uint32_t far_at = 0;
  for (uint32_t node = 0; node < masks.num_nodes; ++node) {
    const EntryRange range = entry_range(masks, node);
    if (range.first > range.last || range.last > num_entries) return "rows that do not ascend";
    if (range.last != (row_word(masks.rows, node + 1) & kEntryBits)) return "rows that do not follow one another";
    if (const char* flaw = find_entry_flaw(masks, node, range, far_at)) return flaw;
  }
  if (far_at != masks.num_far) return "far targets without an entry";
  for (uint32_t i = 0; i < masks.num_eos; ++i)
    if (masks.eos[i] >= masks.vocab_size || (i > 0 && masks.eos[i] <= masks.eos[i - 1]))
      return "end-of-sequence ids outside the vocabulary";
  return nullptr;
}

MaskSet::MaskSet(const MaskView& masks)
    : masks_(masks), num_words_((masks.vocab_size + kMaskWordBits - 1) / kMaskWordBits) {
  std::vector<std::pair<uint32_t, uint32_t>> long_rows;  // length, node
  for (uint32_t node = 0; node < masks_.num_nodes; ++node) {
    const EntryRange range = entry_range(masks_, node);
    if (range.count() > kDenseLength) long_rows.emplace_back(range.count(), node);
  }
  const size_t num_entries = row_word(masks_.rows, masks_.num_nodes);
  num_long_ = long_rows.size();
  const size_t list_bytes = masks_.num_nodes * size_t(kRowHalves) * sizeof(uint16_t) + num_entries * sizeof(uint32_t);
  const size_t most = std::min(kDenseBytes, list_bytes) / (num_words_ * sizeof(uint32_t));
  const size_t kept = std::min(long_rows.size(), std::max<size_t>(1, most));
  std::partial_sort(long_rows.begin(), long_rows.begin() + kept, long_rows.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  for (size_t i = 0; i < kept; ++i) dense_nodes_.push_back(long_rows[i].second);
  std::sort(dense_nodes_.begin(), dense_nodes_.end());
  dense_words_.assign(kept * num_words_, 0);
  for (size_t i = 0; i < kept; ++i) {
    const uint32_t node = dense_nodes_[i];
    set_bits(entry_range(masks_, node), &dense_words_[i * num_words_]);
  }
}

size_t MaskSet::dense_index(uint32_t state) const {
  const auto found = state == 0 ? dense_nodes_.begin()  // where one generation of six is
                                : std::lower_bound(dense_nodes_.begin(), dense_nodes_.end(), state);
  const bool is_dense = found != dense_nodes_.end() && *found == state;
  return static_cast<size_t>((is_dense ? found : dense_nodes_.end()) - dense_nodes_.begin());
}

// Whose row is copied rather than set bit by bit.
const uint32_t* MaskSet::copied_row(uint32_t state, EntryRange range) const {
  if (range.count() <= kCopiedLength) return nullptr;
  const size_t dense = dense_index(state);
  return dense < dense_nodes_.size() ? &dense_words_[dense * num_words_] : nullptr;
}

void MaskSet::set_bits(EntryRange range, uint32_t* row) const {
  for (uint32_t entry = range.first; entry < range.last; ++entry) set_bit(row, entry_token(masks_, entry));
  const ByteRange bytes = byte_range(masks_, range);
  for (uint32_t i = bytes.first; i < bytes.last; ++i) set_bit(row, masks_.bytes.tokens[i]);
  if (range.terminal)
    for (uint32_t i = 0; i < masks_.num_eos; ++i) set_bit(row, masks_.eos[i]);
}

void MaskSet::clear_bits(uint32_t state, uint32_t* row) const {
  const EntryRange range = entry_range(masks_, state);
  if (range.count() > kCopiedLength) {
    memset(row, 0, num_words_ * sizeof(uint32_t));
    return;
  }
  for (uint32_t entry = range.first; entry < range.last; ++entry) row[entry_token(masks_, entry) / kMaskWordBits] = 0;
  const ByteRange bytes = byte_range(masks_, range);
  for (uint32_t i = bytes.first; i < bytes.last; ++i) row[masks_.bytes.tokens[i] / kMaskWordBits] = 0;
  if (range.terminal)
    for (uint32_t i = 0; i < masks_.num_eos; ++i) row[masks_.eos[i] / kMaskWordBits] = 0;
}

void MaskSet::fill(uint32_t state, uint32_t* row) const {
  const EntryRange range = entry_range(masks_, state);
  if (const uint32_t* dense = copied_row(state, range)) {
    memcpy(row, dense, num_words_ * sizeof(uint32_t));
    return;
  }
  memset(row, 0, num_words_ * sizeof(uint32_t));
  set_bits(range, row);
}

void MaskSet::append_allowed(uint32_t state, std::vector<uint32_t>& out) const {
  const EntryRange range = entry_range(masks_, state);
  const size_t before = out.size();
  for (uint32_t entry = range.first; entry < range.last; ++entry) out.push_back(entry_token(masks_, entry));
  if (!range.terminal && !range.single) return;
  const size_t middle = out.size();
  const ByteRange bytes = byte_range(masks_, range);
  out.insert(out.end(), masks_.bytes.tokens + bytes.first, masks_.bytes.tokens + bytes.last);
  if (range.terminal) out.insert(out.end(), masks_.eos, masks_.eos + masks_.num_eos);
  std::inplace_merge(out.begin() + before, out.begin() + middle, out.end());
}

uint32_t MaskSet::count_allowed(uint32_t state) const {
  const EntryRange range = entry_range(masks_, state);
  return range.count() + byte_range(masks_, range).count() + (range.terminal ? masks_.num_eos : 0);
}

void MaskSet::prefetch_row(uint32_t state) const { __builtin_prefetch(masks_.rows + size_t(state) * kRowHalves); }

void MaskSet::advance_each(uint32_t* states, const int64_t* tokens, bool* allowed, size_t count) const {
  for (size_t begin = 0; begin < count; begin += kGroup) {
    const size_t end = std::min(count, begin + kGroup);
    for (size_t i = begin; i < end; ++i) prefetch_row(states[i]);
    for (size_t i = begin; i < end; ++i) __builtin_prefetch(masks_.entries + entry_range(masks_, states[i]).first);
    for (size_t i = begin; i < end; ++i) {
      const bool in_vocabulary = tokens[i] >= 0 && tokens[i] < masks_.vocab_size;
      const uint32_t next = in_vocabulary ? advance(masks_, states[i], static_cast<uint32_t>(tokens[i])) : kRejected;
      allowed[i] = next != kRejected;
      if (allowed[i]) states[i] = next;
      prefetch_row(states[i]);  // which a fill reads next
    }
  }
}

void MaskSet::walk_each(const int64_t* tokens, size_t count, size_t length, size_t stride, uint32_t* states) const {
  for (size_t i = 0; i < count; ++i) {
    uint32_t state = 0;
    for (size_t at = 0; at < length && state < ended(); ++at) {
      const int64_t token = tokens[i * stride + at];
      const bool in_vocabulary = token >= 0 && token < masks_.vocab_size;
      state = in_vocabulary ? advance(masks_, state, static_cast<uint32_t>(token)) : kRejected;
    }
    states[i] = state;
  }
}

}  // namespace flashtrie
