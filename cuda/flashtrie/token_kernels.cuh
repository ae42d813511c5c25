// What masks of strings and steps of a token trie do alike: a batch of states, and the tokens that each allows, as
// logits with minus infinity over the others or as rows of mask words; and states that take tokens. A source says what
// a state allows:
//
//   source.ends, source.dense                 end tokens, and dense rows of states that allow much
//   bool source.mark(early, state, tile, marks)   by a warp; false, with nothing marked, where that is nothing
//   bool source.is_long(state)                by a thread; whether it allows so much that most tiles hold some of it
//   uint32_t source.advance(state, token)     by kLanes threads together (1 or 32); kNothing where it is not allowed
//   uint32_t source.ended()                   the state behind an end-of-sequence token
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
FT_DEVICE void apply_tile(const Source& source, const EarlyReads& early, uint32_t state, const Tile& tile, uint32_t* marks) {
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
  EarlyReads early = read_early(tile, p.source.ends, p.source.dense);
  const uint32_t* const state = p.states + which;
  uint32_t* const marks = shared + (simt::thread() / 32) * Tile::kWords;
  simt::hold(tile.row);
  simt::hold(state);
  simt::await_previous_kernel();
  if (p.batch.rows != nullptr) {
    tile = Tile(p.batch, p.batch.rows[which], number);  // which may begin elsewhere
    early = {p.source.ends.own(), 0, false};
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
  apply_tile(p.source, EarlyReads{p.source.ends.own(), 0, false}, p.states[which], tile, marks);
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
  const EarlyReads early = {p.source.ends.own(), 0, false};
  simt::await_previous_kernel();
  const bool some = p.source.mark(early, p.states[row], tile, marks);
  uint32_t* const words = p.words + row * p.row_stride;
#pragma unroll
  for (uint32_t i = simt::lane(); i < MaskTile::kWords; i += 32) {
    const uint32_t word = number * MaskTile::kWords + i;
    if (word < p.words_per_row) words[word] = some ? marks[i] : 0;
  }
}

template <typename Source>
struct AdvanceParams {
  Source source;
  TokenRows rows;    // of one token
  uint32_t* states;  // rows.num_rows, replaced where the token is allowed
  uint8_t* allowed;  // rows.num_rows, or null
};

template <typename Source>
struct WalkParams {
  Source source;
  TokenRows rows;
  uint32_t* states;  // rows.num_rows: the state after each row from the root, or kNothing
};

// The row of a thread or a warp, whichever takes a token.
template <typename Source>
FT_DEVICE uint32_t row_of_grid() {
  return Source::kLanes == 1 ? simt::block() * simt::num_threads() + simt::thread() : warp_of_grid();
}

template <typename Source>
FT_DEVICE bool speaks_for_row() {
  if (Source::kLanes > 1) simt::sync_warp();  // all have read what is written now
  return Source::kLanes == 1 || simt::lane() == 0;
}

template <typename Source>
FT_DEVICE void advance_rows(const AdvanceParams<Source>& p) {
  simt::release_next_kernel();
  const uint32_t row = row_of_grid<Source>();
  if (row >= p.rows.num_rows) return;
  simt::await_previous_kernel();
  const uint32_t next = p.source.advance(p.states[row], p.rows.token(row, 0));
  if (!speaks_for_row<Source>()) return;
  if (next != kNothing) p.states[row] = next;
  if (p.allowed != nullptr) p.allowed[row] = next != kNothing;
}

template <typename Source>
FT_DEVICE void walk_rows(const WalkParams<Source>& p) {
  simt::release_next_kernel();
  const uint32_t row = row_of_grid<Source>();
  if (row >= p.rows.num_rows) return;
  simt::await_previous_kernel();
  uint32_t state = 0;
#pragma unroll 1
  for (uint32_t at = 0; at < p.rows.length && state < p.source.ended(); ++at) state = p.source.advance(state, p.rows.token(row, at));
  if (speaks_for_row<Source>()) p.states[row] = state;
}

}  // namespace flashtrie

#define FT_APPLY(name, Source, Type, vectors)                                                                         \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_v##vectors(const ApplyParams<Source> p) {         \
    __shared__ uint32_t marks[kTileWarps * LogitTile<Type, vectors>::kWords];                                         \
    apply_tokens<Type, vectors>(p, marks);                                                                            \
  }
#define FT_APPLY_LONG(name, Source, Type, vectors)                                                                    \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_long##vectors(const ApplyParams<Source> p) {      \
    __shared__ ApplyShared<LogitTile<Type, vectors>> shared;                                                          \
    apply_tokens_long_first<Type, vectors>(p, shared);                                                                \
  }
#define FT_APPLIES(name, Source, Type) \
  FT_APPLY(name, Source, Type, 1) FT_APPLY(name, Source, Type, 2) FT_APPLY_LONG(name, Source, Type, 4)
// The kernels of a source; their names begin with `name`.
#define FT_TOKEN_KERNELS(name, Source)                                                                                \
  FT_APPLIES(name##_apply_float32, Source, Float32)                                                                   \
  FT_APPLIES(name##_apply_float16, Source, Float16)                                                                   \
  FT_APPLIES(name##_apply_bfloat16, Source, BFloat16)                                                                 \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_fill(const FillParams<Source> p) {                \
    __shared__ uint32_t marks[kTileWarps * MaskTile::kWords];                                                         \
    fill_words(p, marks);                                                                                             \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_advance(const AdvanceParams<Source> p) {          \
    advance_rows(p);                                                                                                  \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_walk(const WalkParams<Source> p) { walk_rows(p); }
