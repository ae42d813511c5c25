// What masks of strings and steps of a token trie do alike: a batch of states, and the tokens that each allows, as
// logits with minus infinity over the others or as rows of mask words. A source says what a state allows:
//
//   Early source.early(tile)                  by a warp; what can be asked for before the state is known, or little
//   Early source.late()                       of it, where it would cost more than it saves
//   bool source.mark(early, state, tile, marks)   by a warp; false, with nothing marked, where that is nothing
//   bool source.is_long(state)                by a thread; whether it allows so much that most tiles hold some of it
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
  uint32_t num_long_blocks;
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

// A tile of logits, by a warp.
template <typename Tile, typename Source>
FT_DEVICE void apply_tile(const Source& source, const typename Source::Early& early, uint32_t state, const Tile& tile, uint32_t* marks) {
  if (source.mark(early, state, tile, marks))
    tile.keep(marks);
  else
    tile.clear();
}

// A warp a tile. All that does not depend on what the kernel before wrote comes before the wait for it.
template <typename Type, int kVectors, typename Source>
FT_DEVICE void apply_tokens(const ApplyParams<Source>& p, uint32_t* shared) {
  using Tile = LogitTile<Type, kVectors>;
  simt::release_next_kernel();
  const uint32_t item = warp_of_grid(), which = p.batch.row_of(item);
  if (which >= p.batch.num_rows) return;
  const uint32_t number = item - which * p.batch.num_tiles;
  Tile tile(p.batch, which, number);
  typename Source::Early early = p.source.early(tile);
  const uint32_t* const state = p.states + which;
  uint32_t* const marks = shared + (simt::thread() / 32) * Tile::kWords;
  simt::hold(tile.row);
  simt::hold(state);
  simt::await_previous_kernel();
  if (p.batch.rows != nullptr) {
    tile = Tile(p.batch, p.batch.rows[which], number);  // which may begin elsewhere
    early = p.source.late();
  }
  apply_tile(p.source, early, *state, tile, marks);
}

// Shared memory of a block that begins with long rows.
template <typename Tile>
struct ApplyShared {
  uint32_t marks[kTileWarps][Tile::kWords];
  uint32_t rows[kTileThreads];   // with long lists, of those that a block looks at together
  uint32_t counts[kTileWarps];  // of them, by the warp that found them
};

template <typename Tile, typename Source>
FT_DEVICE void apply_item(const ApplyParams<Source>& p, uint32_t which, uint32_t number, uint32_t* marks) {
  const Tile tile(p.batch, p.batch.rows == nullptr ? which : p.batch.rows[which], number);
  apply_tile(p.source, p.source.late(), p.states[which], tile, marks);
}

// The rows with long lists, by the blocks that come first.
template <typename Tile, typename Source>
FT_DEVICE void apply_long_rows(const ApplyParams<Source>& p, ApplyShared<Tile>& shared) {
  const uint32_t warp = simt::thread() / 32;
#pragma unroll 1
  for (uint32_t first = 0; first < p.batch.num_rows; first += kTileThreads) {
    const uint32_t row = first + simt::thread();
    const bool is_long = row < p.batch.num_rows && p.source.is_long(p.states[row]);
    const uint32_t votes = simt::ballot(is_long);
    if (simt::lane() == 0) shared.counts[warp] = simt::count_ones(votes);
    simt::sync_block();
    uint32_t before = 0, num_long = 0;
#pragma unroll
    for (uint32_t i = 0; i < kTileWarps; ++i) {
      before += i < warp ? shared.counts[i] : 0;
      num_long += shared.counts[i];
    }
    if (is_long) shared.rows[before + simt::count_ones(votes & simt::lanes_below())] = row;
    simt::sync_block();
    const uint32_t num_items = num_long * p.batch.num_tiles;
#pragma unroll 1
    for (uint32_t item = warp_of_grid(); item < num_items; item += p.num_long_blocks * kTileWarps) {
      const uint32_t which = p.batch.row_of(item);
      apply_item<Tile>(p, shared.rows[which], item - which * p.batch.num_tiles, shared.marks[warp]);
      simt::sync_warp();  // the marks are read
    }
    simt::sync_block();
  }
}

// The same for a batch that writes more than the second-level cache holds. There, reads among the writes cost the
// memory far more than their bytes (measured: 6 us for 4 MB), so num_long_blocks blocks begin with the rows that need
// many, and the others leave those out.
template <typename Type, int kVectors, typename Source>
FT_DEVICE void apply_tokens_long_first(const ApplyParams<Source>& p, ApplyShared<LogitTile<Type, kVectors>>& shared) {
  using Tile = LogitTile<Type, kVectors>;
  simt::release_next_kernel();
  simt::await_previous_kernel();
  if (simt::block() < p.num_long_blocks) return apply_long_rows<Tile>(p, shared);
  const uint32_t item = warp_of_grid() - p.num_long_blocks * kTileWarps, which = p.batch.row_of(item);
  if (which >= p.batch.num_rows || p.source.is_long(p.states[which])) return;
  apply_item<Tile>(p, which, item - which * p.batch.num_tiles, shared.marks[simt::thread() / 32]);
}

// A warp a tile of mask words.
template <typename Source>
FT_DEVICE void fill_words(const FillParams<Source>& p, uint32_t* shared) {
  simt::release_next_kernel();
  const uint32_t item = warp_of_grid(), row = item / p.num_tiles, number = item % p.num_tiles;
  if (row >= p.num_rows) return;
  const MaskTile tile(number, p.words_per_row);
  uint32_t* const marks = shared + (simt::thread() / 32) * MaskTile::kWords;
  const typename Source::Early early = p.source.late();
  simt::await_previous_kernel();
  const bool some = p.source.mark(early, p.states[row], tile, marks);
  uint32_t* const words = p.words + row * p.row_stride;
#pragma unroll
  for (uint32_t i = simt::lane(); i < MaskTile::kWords; i += 32) {
    const uint32_t word = number * MaskTile::kWords + i;
    if (word < p.words_per_row) words[word] = some ? marks[i] : 0;
  }
}

}  // namespace flashtrie
