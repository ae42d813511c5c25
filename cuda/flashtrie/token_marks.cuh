// Which tokens of a tile are allowed, marked by a warp in shared memory: bit `token - tile.begin`. A tile is a part of
// a row of logits (`LogitTile`) or of mask words (`MaskTile`).
#pragma once
#include "simt.cuh"

namespace flashtrie {

constexpr uint32_t kNothing = 0xffffffffu;  // no token, no place

// How much of a tile is allowed.
enum class Share : uint32_t { nothing, little, much };

// Tokens [low, high) of a row of mask words.
struct MaskTile {
  static constexpr int kWords = 128;
  int32_t begin;
  uint32_t low, high;

  FT_DEVICE MaskTile(uint32_t number, uint32_t num_words)
      : begin(static_cast<int32_t>(number * kWords * 32)), low(begin), high((number + 1) * kWords < num_words ? low + kWords * 32 : num_words * 32) {}
  FT_DEVICE bool holds(uint32_t token) const { return token >= low && token < high; }
};

// Full rows of bits for the nodes with the longest lists, end-of-sequence ids included.
struct DenseRows {
  const uint32_t* nodes;  // num_nodes, ascending
  const uint32_t* words;  // [num_nodes, words_per_row]
  uint32_t num_nodes;
  uint32_t words_per_row;
  uint32_t root_row;      // which of them is the root's; kNothing: none
};

// The end-of-sequence ids, allowed where a member or a key ends.
struct EndTokens {
  const uint32_t* tokens;  // ascending
  uint32_t count;
  uint32_t after_end;  // not 0: allowed behind the end too, for loops that still draw from rows which have ended

  // The lane's, asked for before it is known whether they count.
  FT_DEVICE uint32_t own() const { return simt::lane() < count ? tokens[simt::lane()] : kNothing; }
};

template <typename Tile>
FT_DEVICE void clear_marks(uint32_t* marks) {
#pragma unroll
  for (uint32_t i = simt::lane(); i < Tile::kWords; i += 32) marks[i] = 0;
  simt::sync_warp();
}

template <typename Tile>
FT_DEVICE void mark(const Tile& tile, uint32_t token, uint32_t* marks) {
  if (!tile.holds(token)) return;
  const uint32_t bit = static_cast<uint32_t>(static_cast<int32_t>(token) - tile.begin);
  simt::atomic_or(marks + bit / 32, 1u << (bit % 32));
}

// First place of [first, last) whose value is not below `wanted`, values ascending; by all lanes together, which read
// once for every factor of 32.
template <typename Value>
FT_DEVICE uint32_t find_first(uint32_t first, uint32_t last, uint32_t wanted, const Value& value) {
#pragma unroll 1
  while (last - first > 32) {
    const uint32_t step = (last - first + 31) / 32, at = first + simt::lane() * step;
    const uint32_t below = simt::count_ones(simt::ballot(at < last && value(at) < wanted));
    if (below == 0) return first;
    const uint32_t reached = first + below * step;
    first = reached - step + 1;
    last = reached < last ? reached : last;
  }
  const uint32_t at = first + simt::lane();
  return first + simt::count_ones(simt::ballot(at < last && value(at) < wanted));
}

// Marks the tokens value(first) to value(last - 1), which ascend, and the end tokens, if those count. `own`: the lane's
// value of the first 32, if there are no more. Nothing is marked where the tile holds none of them.
template <typename Tile, typename Value>
FT_DEVICE Share mark_list(const Tile& tile, uint32_t own, uint32_t first, uint32_t last, const Value& value,
                         const EndTokens& ends, bool with_ends, uint32_t own_end, uint32_t* marks) {
  const uint32_t lane = simt::lane();
  if (last - first > 32) {
    first = find_first(first, last, tile.low, value);
    own = first + lane < last ? value(first + lane) : kNothing;
  }
  if (!with_ends) own_end = kNothing;
  const bool more_ends = with_ends && ends.count > 32;
  if (!more_ends && !simt::any(tile.holds(own) || tile.holds(own_end))) return Share::nothing;
  clear_marks<Tile>(marks);
#pragma unroll 1
  for (;;) {
    mark(tile, own, marks);
    if (simt::any(own >= tile.high)) break;
    first += 32;
    own = first + lane < last ? value(first + lane) : kNothing;
  }
  mark(tile, own_end, marks);
  if (more_ends)
#pragma unroll 1
    for (uint32_t i = lane + 32; i < ends.count; i += 32) mark(tile, ends.tokens[i], marks);
  simt::sync_warp();
  return Share::little;
}

// 32 bits of a row from bit `from` on, which may lie outside of it.
FT_DEVICE uint32_t bits_from(const uint32_t* words, uint32_t num_words, int32_t from) {
  const int32_t word = from >> 5, count = static_cast<int32_t>(num_words);
  const uint32_t first = word >= 0 && word < count ? words[word] : 0;
  if (from % 32 == 0) return first;
  const uint32_t second = word + 1 >= 0 && word + 1 < count ? words[word + 1] : 0;
  return first >> (from & 31) | second << (32 - (from & 31));
}

// The same as `mark_list` from a dense row.
template <typename Tile>
FT_DEVICE Share mark_dense(const Tile& tile, const DenseRows& dense, uint32_t row, uint32_t* marks) {
  const uint32_t* words = dense.words + static_cast<uint64_t>(row) * dense.words_per_row;
  uint32_t some = 0;
#pragma unroll
  for (uint32_t i = simt::lane(); i < Tile::kWords; i += 32) {
    const uint32_t bits = bits_from(words, dense.words_per_row, tile.begin + 32 * static_cast<int32_t>(i));
    marks[i] = bits;
    some |= bits;
  }
  simt::sync_warp();
  return simt::any(some != 0) ? Share::much : Share::nothing;
}

}  // namespace flashtrie
