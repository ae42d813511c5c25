// Token masks on logits, from the lists: no mask row is made or moved.
//
// mask_apply writes minus infinity over a batch of logits but for the tokens that each row's state allows. The grid
// stays: a block goes from chunk to chunk (16 KiB of one row), marks the chunk's allowed tokens in shared memory and
// writes. What it takes to know them is three reads that wait for one another, slow ones while the memory is busy
// with stores; so each is asked for one chunk ahead of the next.
//
// Reads a chunk: the state, two words of rows, then the row's entries (a list up to kThreads) or the chunk's words of
// the node's dense row (one of the few long lists), and the vectors of logits that hold an allowed token. Writes a
// row: its logits once. So the bound is that of filling the logits.
//
// mask_advance takes one token for each state: two dependent reads, then log2 of the list's length.
#include "../flashtrie/masks.cuh"

namespace flashtrie {

#ifndef FT_MASK_BLOCKS
#define FT_MASK_BLOCKS 5  // of a multiprocessor at a time: what 48 registers a thread leave room for
#endif
constexpr int kThreads = 256;
constexpr int kThreadVectors = 4;                          // 16-byte vectors a thread and chunk
constexpr int kChunkVectors = kThreadVectors * kThreads;  // 16 KiB of logits
constexpr int kBuffers = 3;  // marks of this chunk, of the next, and of the last one, being cleared

struct MaskApplyParams {
  MaskView masks;
  const uint32_t* dense_nodes;  // num_dense, ascending: nodes with a dense row
  const uint32_t* dense_words;  // [num_dense, words_per_row]: bit t: token t is allowed, end-of-sequence ids included
  void* logits;
  const uint32_t* states;       // num_rows
  int64_t row_stride;           // logits from one row to the next
  uint32_t width;               // logits a row
  uint32_t num_rows;
  uint32_t num_chunks;          // of a row
  uint32_t num_dense;
  uint32_t words_per_row;
};

struct MaskAdvanceParams {
  MaskView masks;
  uint32_t* states;         // num_rows, replaced where the token is allowed
  const void* tokens;       // num_rows of token_bytes bytes, signed
  uint8_t* allowed;         // num_rows, or null
  uint32_t num_rows;
  int32_t token_bytes;      // 4 or 8
};

// Raw logits of a size, and what minus infinity is in them.
struct Float32 {
  using Raw = uint32_t;
  static constexpr Raw kMinusInfinity = 0xff800000u;
};
struct Float16 {
  using Raw = uint16_t;
  static constexpr Raw kMinusInfinity = 0xfc00u;
};
struct BFloat16 {
  using Raw = uint16_t;
  static constexpr Raw kMinusInfinity = 0xff80u;
};

// A chunk: logits [low, high) of a row; `begin` is where its first vector starts, which may lie before the row,
// because vectors start on 16 bytes.
template <typename Type>
struct Chunk {
  using Raw = typename Type::Raw;
  static constexpr int kPer = 16 / sizeof(Raw);  // logits a vector
  Raw* row;
  int64_t begin;
  uint32_t low, high;

  __device__ Chunk(const MaskApplyParams& p, uint32_t item) {
    row = static_cast<Raw*>(p.logits) + static_cast<int64_t>(item / p.num_chunks) * p.row_stride;
    const int64_t shift = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(Raw));
    begin = static_cast<int64_t>(item % p.num_chunks) * (kChunkVectors * kPer) - shift;
    low = static_cast<uint32_t>(max(begin, int64_t(0)));
    high = static_cast<uint32_t>(min(begin + kChunkVectors * kPer, static_cast<int64_t>(p.width)));
  }
};

enum class Form : uint32_t { list, dense, long_list };

// What is allowed in a row: an entry a thread, a word of the dense row a thread, or a list to search.
struct Allowed {
  EntryRange range;
  Form form;
  uint32_t own;  // the thread's entry or word
};

__device__ uint32_t load_state(const MaskApplyParams& p, uint32_t item, uint32_t num_items) {
  return item < num_items ? min(p.states[item / p.num_chunks], p.masks.num_nodes) : p.masks.num_nodes;
}

// 32 bits of a dense row from bit `from` on, which may lie outside of it.
__device__ uint32_t dense_bits(const uint32_t* words, uint32_t num_words, int64_t from) {
  const int64_t word = from >> 5;
  const uint32_t first = word >= 0 && word < num_words ? words[word] : 0;
  const uint32_t second = word + 1 >= 0 && word + 1 < num_words ? words[word + 1] : 0;
  return __funnelshift_r(first, second, static_cast<uint32_t>(from & 31));
}

template <typename Type>
__device__ Allowed load_allowed(const MaskApplyParams& p, uint32_t state, EntryRange range, uint32_t item, uint32_t num_items) {
  Allowed found{range, Form::list, 0};
  if (item >= num_items) {
    found.range = {0, 0, false};
    return found;
  }
  if (range.last - range.first <= kThreads) {
    if (range.first + threadIdx.x < range.last) found.own = p.masks.entries[range.first + threadIdx.x];
    return found;
  }
  const uint32_t at = lower_bound(p.dense_nodes, 0, p.num_dense, state);
  if (at == p.num_dense || p.dense_nodes[at] != state) {
    found.form = Form::long_list;
    return found;
  }
  found.form = Form::dense;
  const int64_t from = Chunk<Type>(p, item).begin + 32 * static_cast<int64_t>(threadIdx.x);
  found.own = dense_bits(p.dense_words + static_cast<uint64_t>(at) * p.words_per_row, p.words_per_row, from);
  return found;
}

// The part of a long list that may lie in [low, high): whole steps of a kThreads-th of it. All threads together.
__device__ void narrow(const MaskView& masks, uint32_t low, uint32_t high, uint32_t& first, uint32_t& last) {
  const uint32_t begin = first, count = last - first;
  const auto at = [&](uint32_t step) { return begin + static_cast<uint32_t>(uint64_t(count) * step / kThreads); };
  const uint32_t probe = entry_token(masks, at(threadIdx.x));
  const uint32_t steps_below = __syncthreads_count(probe < low);
  const uint32_t steps_before = __syncthreads_count(probe < high);
  first = at(steps_below > 0 ? steps_below - 1 : 0);
  last = at(steps_before);
}

// Marks the chunk's allowed tokens: bit token - chunk.begin.
template <typename Type>
__device__ void mark(const MaskApplyParams& p, const Chunk<Type>& chunk, const Allowed& allowed, uint32_t* bits) {
  constexpr uint32_t kWords = kChunkVectors * Chunk<Type>::kPer / 32;
  const auto set = [&](uint32_t token) {
    if (token < chunk.low || token >= chunk.high) return;
    const uint32_t bit = static_cast<uint32_t>(token - chunk.begin);
    atomicOr(bits + bit / 32, 1u << (bit % 32));
  };
  uint32_t first = allowed.range.first, last = allowed.range.last;
  if (allowed.form == Form::dense) {
    if (threadIdx.x < kWords) bits[threadIdx.x] = allowed.own;
    return;
  }
  if (allowed.form == Form::list) {
    if (first + threadIdx.x < last) set(allowed.own >> p.masks.hop_bits);
  } else {
    narrow(p.masks, chunk.low, chunk.high, first, last);
    for (uint32_t entry = first + threadIdx.x; entry < last; entry += kThreads) set(entry_token(p.masks, entry));
  }
  if (allowed.range.terminal)
    for (uint32_t i = threadIdx.x; i < p.masks.num_eos; i += kThreads) set(p.masks.eos[i]);
}

// Vectors without an allowed token are written unread; of the others all are read before any is written.
template <typename Type>
__device__ void write(const Chunk<Type>& chunk, uint32_t width, const uint32_t* bits) {
  using Raw = typename Type::Raw;
  constexpr int kPer = Chunk<Type>::kPer;
  constexpr uint32_t kWord = sizeof(Raw) == 4 ? Type::kMinusInfinity : Type::kMinusInfinity * 0x10001u;
  union Vector {
    uint4 whole;
    Raw logits[kPer];
  };
  Vector vectors[kThreadVectors];
  uint32_t kept[kThreadVectors];
#pragma unroll
  for (int j = 0; j < kThreadVectors; ++j) {
    const uint32_t bit = (threadIdx.x + j * kThreads) * kPer;
    const int64_t first = chunk.begin + bit;
    const bool is_whole = first >= 0 && first + kPer <= width;
    kept[j] = is_whole ? (bits[bit / 32] >> (bit % 32)) & ((1u << kPer) - 1) : ~0u;
    vectors[j].whole = make_uint4(kWord, kWord, kWord, kWord);
    if (is_whole && kept[j] != 0) {
      Vector old;
      old.whole = *reinterpret_cast<const uint4*>(chunk.row + first);
#pragma unroll
      for (int i = 0; i < kPer; ++i)
        if ((kept[j] >> i) & 1) vectors[j].logits[i] = old.logits[i];
    }
  }
#pragma unroll
  for (int j = 0; j < kThreadVectors; ++j) {
    const uint32_t bit = (threadIdx.x + j * kThreads) * kPer;
    const int64_t first = chunk.begin + bit;
    if (kept[j] != ~0u) {
      *reinterpret_cast<uint4*>(chunk.row + first) = vectors[j].whole;
      continue;
    }
    for (int i = 0; i < kPer; ++i)  // over the row's ends
      if (first + i >= 0 && first + i < width && !((bits[bit / 32] >> (bit % 32 + i)) & 1))
        chunk.row[first + i] = Type::kMinusInfinity;
  }
}

template <typename Type>
__device__ void apply(const MaskApplyParams& p) {
  constexpr uint32_t kWords = kChunkVectors * Chunk<Type>::kPer / 32;
  static_assert(kWords <= kThreads, "a thread marks one word of a dense row");
  __shared__ uint32_t bits[kBuffers][kWords];
  for (uint32_t i = threadIdx.x; i < kBuffers * kWords; i += kThreads) bits[0][i] = 0;
  __syncthreads();
  const uint32_t num_items = p.num_rows * p.num_chunks, step = gridDim.x;
  uint32_t item = blockIdx.x;
  uint32_t next_state = load_state(p, item + step, num_items), later_state = load_state(p, item + 2 * step, num_items);
  const uint32_t state = load_state(p, item, num_items);
  EntryRange next_range = entry_range(p.masks, next_state);
  Allowed allowed = load_allowed<Type>(p, state, entry_range(p.masks, state), item, num_items);
  for (int turn = 0; item < num_items; item += step, turn = turn == 2 ? 0 : turn + 1) {
    const Chunk<Type> chunk(p, item);
    mark(p, chunk, allowed, bits[turn]);
    allowed = load_allowed<Type>(p, next_state, next_range, item + step, num_items);
    next_range = entry_range(p.masks, later_state);
    next_state = later_state;
    later_state = load_state(p, item + 3 * step, num_items);
    __syncthreads();
    write(chunk, p.width, bits[turn]);
    // The buffer of the chunk before: all have passed the barrier, so nobody reads it any more; and it is
    // marked again only behind the next barrier.
    uint32_t* const stale = bits[turn == 0 ? 2 : turn - 1];
    if (threadIdx.x < kWords) stale[threadIdx.x] = 0;
  }
}

}  // namespace flashtrie

using namespace flashtrie;

extern "C" __global__ void __launch_bounds__(kThreads, FT_MASK_BLOCKS) mask_apply_float32(const MaskApplyParams p) { apply<Float32>(p); }
extern "C" __global__ void __launch_bounds__(kThreads, FT_MASK_BLOCKS) mask_apply_float16(const MaskApplyParams p) { apply<Float16>(p); }
extern "C" __global__ void __launch_bounds__(kThreads, FT_MASK_BLOCKS) mask_apply_bfloat16(const MaskApplyParams p) { apply<BFloat16>(p); }

extern "C" __global__ void __launch_bounds__(kThreads) mask_advance(const MaskAdvanceParams p) {
  const uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= p.num_rows) return;
  const int64_t token = p.token_bytes == 8 ? static_cast<const int64_t*>(p.tokens)[row]
                                           : static_cast<const int32_t*>(p.tokens)[row];
  const uint32_t state = min(p.states[row], p.masks.num_nodes);
  const bool in_vocabulary = token >= 0 && token < p.masks.vocab_size;
  const uint32_t next = in_vocabulary ? advance(p.masks, state, static_cast<uint32_t>(token)) : kRejected;
  if (next != kRejected) p.states[row] = next;
  if (p.allowed != nullptr) p.allowed[row] = next != kRejected;
}
