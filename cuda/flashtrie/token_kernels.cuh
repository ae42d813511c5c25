// What masks of strings and steps of a token trie do alike: a batch of states, and the tokens that each allows, as
// logits with minus infinity over the others or as rows of mask words. A source says what a state allows:
//
//   bool source.mark(state, tile, marks)   by a warp; false, with nothing marked, where that is nothing
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
