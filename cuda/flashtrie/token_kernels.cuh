// What masks of strings and steps of a token trie do alike: a batch of states, and the tokens that each allows, as
// logits with minus infinity over the others or as rows of mask words. A source says what a state allows:
//
//   bool source.mark(state, tile, marks)      by a warp; false, with nothing marked, where that is nothing
//   bool source.may_allow(state, low, high)   by a thread; false only where nothing in [low, high) is allowed
#pragma once
#include "logit_tiles.cuh"
#include "token_marks.cuh"

namespace flashtrie {

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;

template <typename Source>
struct ApplyParams {
  Source source;
  LogitBatch batch;
  const uint32_t* states;  // batch.num_rows
};

template <typename Source>
struct FillParams {
  Source source;
  const uint32_t* states;  // num_rows
  uint32_t* words;         // [num_rows, words_per_row]: bit t % 32 of word t / 32
  int64_t row_stride;      // words from one row to the next
  uint32_t words_per_row;
  uint32_t num_rows;
  uint32_t num_tiles;      // of a row
};

// Tokens of a batch, [num_rows, length].
struct TokenRows {
  const void* tokens;   // of token_bytes bytes, signed
  int64_t row_stride;   // tokens from one row to the next
  uint32_t num_rows;
  uint32_t length;
  int32_t token_bytes;  // 4 or 8

  FT_DEVICE int64_t token(uint32_t row, uint32_t at) const {
    const int64_t place = row * row_stride + at;
    return token_bytes == 8 ? static_cast<const int64_t*>(tokens)[place] : static_cast<const int32_t*>(tokens)[place];
  }
};

FT_DEVICE uint32_t warp_of_grid() { return simt::block() * (simt::num_threads() / 32) + simt::thread() / 32; }

// A warp a tile of logits. `shared`: kWords for each warp.
template <typename Type, int kVectors, typename Source>
FT_DEVICE void apply_tokens(const ApplyParams<Source>& p, uint32_t* shared) {
  using Tile = LogitTile<Type, kVectors>;
  simt::release_next_kernel();
  const uint32_t item = warp_of_grid(), row = p.batch.row_of(item);
  if (row >= p.batch.num_rows) return;
  uint32_t* const marks = shared + (simt::thread() / 32) * Tile::kWords;
  simt::await_previous_kernel();
  const Tile tile(p.batch, row, item - row * p.batch.num_tiles);
  if (p.source.mark(p.states[row], tile, marks))
    tile.keep(marks);
  else
    tile.clear();
}

// A warp many tiles, for batches that write more than the cache holds: reads among the writes cost the memory more
// than their bytes, so a warp first looks at up to 32 tiles at once, a lane each, does those that may keep something,
// and then clears the others. `shared`: kWords for each warp.
template <typename Type, int kVectors, typename Source>
FT_DEVICE void stream_tokens(const ApplyParams<Source>& p, uint32_t* shared) {
  using Tile = LogitTile<Type, kVectors>;
  simt::release_next_kernel();
  uint32_t* const marks = shared + (simt::thread() / 32) * Tile::kWords;
  const uint32_t num_warps = simt::num_blocks() * (simt::num_threads() / 32);
  const uint32_t num_items = p.batch.num_rows * p.batch.num_tiles;
  const auto tile_of = [&p](uint32_t item) {
    const uint32_t row = p.batch.row_of(item);
    return Tile(p.batch, row, item - row * p.batch.num_tiles);
  };
  simt::await_previous_kernel();
#pragma unroll 1
  for (uint32_t first = warp_of_grid(); first < num_items; first += 32 * num_warps) {
    const uint32_t item = first + simt::lane() * num_warps;
    uint32_t state = 0;
    bool may_keep = false;
    if (item < num_items) {
      state = p.states[p.batch.row_of(item)];
      const Tile tile = tile_of(item);
      may_keep = p.source.may_allow(state, tile.low, tile.high);
    }
    uint32_t clear = simt::ballot(item < num_items);
#pragma unroll 1
    for (uint32_t left = simt::ballot(may_keep); left != 0; left &= left - 1) {
      const uint32_t at = simt::lowest_one(left);
      const Tile tile = tile_of(first + at * num_warps);
      if (!p.source.mark(simt::shuffle(state, at), tile, marks)) continue;
      tile.keep(marks);
      simt::sync_warp();  // the marks are read
      clear &= ~(1u << at);
    }
#pragma unroll 1
    for (; clear != 0; clear &= clear - 1) tile_of(first + simt::lowest_one(clear) * num_warps).clear();
  }
}

// A warp a tile of mask words.
template <typename Source>
FT_DEVICE void fill_words(const FillParams<Source>& p, uint32_t* shared) {
  simt::release_next_kernel();
  const uint32_t item = warp_of_grid(), row = item / p.num_tiles, number = item % p.num_tiles;
  if (row >= p.num_rows) return;
  const MaskTile tile(number, p.words_per_row);
  uint32_t* const marks = shared + (simt::thread() / 32) * MaskTile::kWords;
  simt::await_previous_kernel();
  const bool some = p.source.mark(p.states[row], tile, marks);
  uint32_t* const words = p.words + row * p.row_stride;
#pragma unroll
  for (uint32_t i = simt::lane(); i < MaskTile::kWords; i += 32) {
    const uint32_t word = number * MaskTile::kWords + i;
    if (word < p.words_per_row) words[word] = some ? marks[i] : 0;
  }
}

}  // namespace flashtrie
