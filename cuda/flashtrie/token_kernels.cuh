// What masks of strings and steps of a token trie do alike: a batch of states, and the tokens that each allows, as
// logits with minus infinity over the others or as rows of mask words; and states that take tokens. A source says what
// a state allows:
//
//   source.ends, source.dense                 end tokens, and dense rows of states that allow much
//   Share source.mark(state, tile, marks)     by a warp, for any state; nothing is marked where that is nothing
//   bool source.is_long(state)                by a thread; whether it allows so much that most tiles hold some of it;
//                                             only of sources with FT_LONG_KERNELS
//   uint32_t source.advance(state, token)     by kLanes threads together (1 or 32); kNothing where it is not allowed
//   uint32_t source.ended()                   the state behind an end-of-sequence token
#pragma once
#include "logit_tiles.cuh"
#include "token_marks.cuh"

namespace flashtrie {

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kLongBlocks = 5;  // that a multiprocessor runs at once of the kernels that begin with long rows

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

// One value for the warp, of what each lane read while it may have been changing.
FT_DEVICE uint32_t for_all(uint32_t value) { return simt::shuffle(value, 0); }

// Marks what a tile keeps of a state.
template <typename Tile, typename Source>
FT_DEVICE Share mark_tile(const Source& source, uint32_t state, const Tile& tile, uint32_t* marks) {
  const Share share = source.mark(state, tile, marks);
  return share == Share::much && !tile.is_whole ? Share::little : share;
}

// Writes a marked tile; `first`: what `read` gave of its first vectors, if it keeps much.
template <typename Tile>
FT_DEVICE void write_tile(const Tile& tile, Share share, const typename Tile::Kept& first, const uint32_t* marks) {
  if (share == Share::nothing) return tile.clear();
  if (share == Share::little) return tile.clear_around(marks);
  tile.write(first, marks, 0);
#pragma unroll 1
  for (int from = Tile::kTogether; from < Tile::kVectors; from += Tile::kTogether) tile.write(tile.read(marks, from), marks, from);
}

template <typename Tile, typename Source>
FT_DEVICE void apply_tile(const ApplyParams<Source>& p, uint32_t row, uint32_t state, uint32_t number, uint32_t* marks) {
  const Tile tile(p.batch, row, number);
  const Share share = mark_tile(p.source, state, tile, marks);
  typename Tile::Kept first;
  if (share == Share::much) first = tile.read(marks, 0);
  write_tile(tile, share, first, marks);
}

// A tile of logits, by a warp. What a row allows is worked out before the wait for the kernels before, from the state
// that is there by then, and again only if they wrote another: as a rule a state is old, and the logits are new.
// With kSkipsLong, tiles of rows with long lists are left to others.
template <bool kSkipsLong, typename Tile, typename Source>
FT_DEVICE void apply_tile_early(const ApplyParams<Source>& p, uint32_t item, uint32_t* marks) {
  const uint32_t which = p.batch.row_of(item);
  if (which >= p.batch.num_rows) return;
  const uint32_t number = item - which * p.batch.num_tiles;
  const uint32_t early_row = for_all(p.batch.place_of(which)), early_state = for_all(simt::load_changing(p.states + which));
  const Tile tile(p.batch, early_row, number);
  bool is_left = false;
  if constexpr (kSkipsLong) is_left = p.source.is_long(early_state);
  const Share share = is_left ? Share::nothing : mark_tile(p.source, early_state, tile, marks);
  if (share == Share::much && p.batch.rows == nullptr) tile.prefetch(marks);
  simt::await_previous_kernel();
  const uint32_t row = p.batch.place_of(which);
  typename Tile::Kept first;
  if (share == Share::much && row == early_row) first = tile.read(marks, 0);
  const uint32_t state = simt::load_changing(p.states + which);
  if (row == early_row && state == early_state) {
    if (!is_left) write_tile(tile, share, first, marks);
    return;
  }
  simt::sync_warp();  // the marks are read
  if constexpr (kSkipsLong)
    if (p.source.is_long(state)) return;
  apply_tile<Tile>(p, row, state, number, marks);
}

// A warp a tile.
template <typename Tile, typename Source>
FT_DEVICE void apply_tokens(const ApplyParams<Source>& p, uint32_t* shared) {
  simt::release_next_kernel();
  apply_tile_early<false, Tile>(p, warp_of_grid(), shared + (simt::thread() / 32) * Tile::kWords);
}

// Shared memory of a block that begins with long rows.
template <typename Tile>
struct ApplyShared {
  uint32_t marks[kTileWarps][Tile::kWords];
  uint32_t rows[kTileThreads];   // with long lists, of those that a block looks at together
  uint32_t states[kTileThreads];
  uint32_t counts[kTileWarps];  // of them, by the warp that found them
};

// The number of rows with long lists among the kTileThreads from `first` on, which it puts into shared memory; by a
// block. `state`: what the thread's row was found in.
template <typename Tile, typename Source>
FT_DEVICE uint32_t find_long_rows(const ApplyParams<Source>& p, uint32_t first, ApplyShared<Tile>& shared, uint32_t* state) {
  const uint32_t row = first + simt::thread(), warp = simt::thread() / 32;
  const bool is_row = row < p.batch.num_rows;
  *state = is_row ? simt::load_changing(p.states + row) : 0;
  const bool is_long = is_row && p.source.is_long(*state);
  const uint32_t votes = simt::ballot(is_long);
  if (simt::lane() == 0) shared.counts[warp] = simt::count_ones(votes);
  simt::sync_block();
  uint32_t before = 0, num_long = 0;
#pragma unroll
  for (uint32_t i = 0; i < kTileWarps; ++i) {
    before += i < warp ? shared.counts[i] : 0;
    num_long += shared.counts[i];
  }
  if (is_long) {
    const uint32_t at = before + simt::count_ones(votes & simt::lanes_below());
    shared.rows[at] = p.batch.place_of(row);
    shared.states[at] = *state;
  }
  simt::sync_block();
  return num_long;
}

// Whether a row's state is another than `early`, for any thread of the block.
template <typename Tile, typename Source>
FT_DEVICE bool have_changed(const ApplyParams<Source>& p, uint32_t row, uint32_t early, ApplyShared<Tile>& shared) {
  const bool is_other = row < p.batch.num_rows && simt::load_changing(p.states + row) != early;
  const bool is_any = simt::any(is_other);
  if (simt::lane() == 0) shared.counts[simt::thread() / 32] = is_any;
  simt::sync_block();
  uint32_t found = 0;
#pragma unroll
  for (uint32_t i = 0; i < kTileWarps; ++i) found |= shared.counts[i];
  simt::sync_block();
  return found != 0;
}

// The tiles of rows with long lists that are the warp's, `most` of them at most.
template <typename Tile, typename Source, typename Work>
FT_DEVICE void each_long_tile(const ApplyParams<Source>& p, uint32_t num_long, uint32_t most, const ApplyShared<Tile>& shared, const Work& work) {
  const uint32_t num_items = num_long * p.batch.num_tiles;
#pragma unroll 1
  for (uint32_t item = warp_of_grid(); most > 0 && item < num_items; --most, item += p.num_long_blocks * kTileWarps) {
    const uint32_t which = p.batch.row_of(item);
    work(shared.rows[which], shared.states[which], item - which * p.batch.num_tiles);
    simt::sync_warp();  // the marks are read
  }
}

// The rows with long lists, by the blocks that come first. While the kernel before still writes, each warp asks for the
// logits that it keeps of its first tile; more would be in the way of those writes.
template <typename Tile, typename Source>
FT_DEVICE void apply_long_rows(const ApplyParams<Source>& p, ApplyShared<Tile>& shared) {
  uint32_t* const marks = shared.marks[simt::thread() / 32];
#pragma unroll 1
  for (uint32_t first = 0; first < p.batch.num_rows; first += kTileThreads) {
    uint32_t state;
    uint32_t num_long = find_long_rows(p, first, shared, &state);
    if (first == 0) {
      if (p.batch.rows == nullptr)
        each_long_tile(p, num_long, 1, shared, [&](uint32_t row, uint32_t at, uint32_t number) {
          const Tile tile(p.batch, row, number);
          if (mark_tile(p.source, at, tile, marks) == Share::much) tile.prefetch(marks);
        });
      simt::await_previous_kernel();
      if (p.batch.rows != nullptr || have_changed(p, simt::thread(), state, shared)) num_long = find_long_rows(p, first, shared, &state);
    }
    each_long_tile(p, num_long, kNothing, shared, [&](uint32_t row, uint32_t at, uint32_t number) { apply_tile<Tile>(p, row, at, number, marks); });
    simt::sync_block();
  }
}

// The same for a batch that writes more than the second-level cache holds. There, reads among the writes cost the
// memory far more than their bytes (measured: 6 us for 4 MB), so num_long_blocks blocks begin with the rows that need
// many, and the others leave those out.
template <typename Source, typename Tile>
FT_DEVICE void apply_tokens_long_first(const ApplyParams<Source>& p, ApplyShared<Tile>& shared) {
  simt::release_next_kernel();
  if (simt::block() < p.num_long_blocks) return apply_long_rows<Tile>(p, shared);
  apply_tile_early<true, Tile>(p, warp_of_grid() - p.num_long_blocks * kTileWarps, shared.marks[simt::thread() / 32]);
}

// A warp a tile of mask words.
template <typename Source>
FT_DEVICE void fill_words(const FillParams<Source>& p, uint32_t* shared) {
  simt::release_next_kernel();
  const uint32_t item = warp_of_grid(), row = item / p.num_tiles, number = item % p.num_tiles;
  if (row >= p.num_rows) return;
  const MaskTile tile(number, p.words_per_row);
  uint32_t* const marks = shared + (simt::thread() / 32) * MaskTile::kWords;
  const uint32_t early_state = for_all(simt::load_changing(p.states + row));
  Share share = p.source.mark(early_state, tile, marks);
  simt::await_previous_kernel();
  const uint32_t state = simt::load_changing(p.states + row);
  if (state != early_state) share = p.source.mark(state, tile, marks);
  uint32_t* const words = p.words + row * p.row_stride;
#pragma unroll
  for (uint32_t i = simt::lane(); i < MaskTile::kWords; i += 32) {
    const uint32_t word = number * MaskTile::kWords + i;
    if (word < p.words_per_row) words[word] = share == Share::nothing ? 0 : marks[i];
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

#define FT_APPLY(name, Source, Type, vectors, together, blocks)                                                       \
  extern "C" __global__ void __launch_bounds__(kTileThreads, blocks) name##_v##vectors(const ApplyParams<Source> p) { \
    using Tile = LogitTile<Type, vectors, together>;                                                                  \
    __shared__ uint32_t marks[kTileWarps * Tile::kWords];                                                             \
    apply_tokens<Tile>(p, marks);                                                                                     \
  }
#define FT_APPLIES(name, Source, Type, together, blocks) \
  FT_APPLY(name, Source, Type, 1, 1, 8) FT_APPLY(name, Source, Type, 2, 2, 8) FT_APPLY(name, Source, Type, 4, together, blocks)
#define FT_APPLY_LONG(name, Source, Type)                                                                             \
  extern "C" __global__ void __launch_bounds__(kTileThreads, kLongBlocks) name##_long4(const ApplyParams<Source> p) { \
    __shared__ ApplyShared<LogitTile<Type, 4>> shared;                                                                \
    apply_tokens_long_first(p, shared);                                                                               \
  }
// The kernels of a source; their names begin with `name`. Of four vectors a lane, `together` are read before they are
// written, and `blocks` run on a multiprocessor at once.
#define FT_TOKEN_KERNELS(name, Source, together, blocks)                                                              \
  FT_APPLIES(name##_apply_float32, Source, Float32, together, blocks)                                                 \
  FT_APPLIES(name##_apply_float16, Source, Float16, together, blocks)                                                 \
  FT_APPLIES(name##_apply_bfloat16, Source, BFloat16, together, blocks)                                               \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_fill(const FillParams<Source> p) {                \
    __shared__ uint32_t marks[kTileWarps * MaskTile::kWords];                                                         \
    fill_words(p, marks);                                                                                             \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_advance(const AdvanceParams<Source> p) {          \
    advance_rows(p);                                                                                                  \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(kTileThreads) name##_walk(const WalkParams<Source> p) { walk_rows(p); }
// And those that begin with the rows of long lists.
#define FT_LONG_KERNELS(name, Source)                    \
  FT_APPLY_LONG(name##_apply_float32, Source, Float32)   \
  FT_APPLY_LONG(name##_apply_float16, Source, Float16)   \
  FT_APPLY_LONG(name##_apply_bfloat16, Source, BFloat16)
