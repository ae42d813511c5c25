// Rows of logits from their chunks: the candidates of every depth, by the warps of one block (nvcc only).
//
// Contract: of each row its top_k best, descending, ties to the lower id; their costs against the row's log-sum-exp.
// A chunk's keys come sorted, and lie in as many lanes, so that a warp holds several lists in a register. Of two lists the best
// are the larger ones of a[i] and b[last - i], which rise and then fall; a few exchanges sort them (Batcher, 1968). So a
// row's chunks go through a tournament of a few rounds, whatever top_k is, with nothing looked up and nothing branched on. A warp
// merges two rows at once, so that the latency of one hides that of the other.
#pragma once
#include "draft_mail.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

constexpr uint32_t kNoCost = 0x7fffffffu;  // bits of a NaN: it ends a list, and every sum with it ends one too

// Candidates of every depth in shared memory: costs (negated log-probs) ascending, then ends, at least two; behind the last
// depth are two rows of ends.
struct DraftLists {
  float* costs;   // [num_depths + 2, stride]
  uint32_t* ids;  // [num_depths + 2, stride]
  int stride;     // top_k + 2 rounded up to a power of two
  int top_k;
};

// What the chunks of one batch row send.
struct ChunkMail {
  uint64_t* keys;  // [num_depths, num_chunks, chunk_keys(top_k)]
  uint64_t* sums;  // [num_depths, num_chunks]
  int num_depths, num_chunks, top_k;
};

constexpr int kRowsAtOnce = 2;  // of a warp
constexpr int kRegisters = 5;   // for the chunks' lists of a row: 19 chunks of 151,936 logits

// kWidth: chunk_keys(top_k).
template <int kWidth>
class RowMerge {
 public:
  __device__ explicit RowMerge(const ChunkMail& mail) : mail_(mail), lane_(threadIdx.x & 31) {}

  // One warp: depths first and first + step, if that is below num_depths. Returns whether one of them is bad.
  __device__ bool run(int first, int step, const DraftLists& lists) {
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const int depth = first + row * step;
      first_[row] = (depth < mail_.num_depths ? depth : first) * mail_.num_chunks;
      best_[row] = kNothing;
      sums_[row] = {-INFINITY, 0.0f};
    }
#pragma unroll 1
    for (int chunk = 0; chunk < mail_.num_chunks; chunk += kChunksAtOnce) take(chunk);
#pragma unroll
    for (int apart = kWidth; apart < 32; apart <<= 1)
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) best_[row] = merge(best_[row], best_[row], apart | (kWidth - 1));
    bool is_bad = false;
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) sums_[row] = warp_join(sums_[row]);
    float lse[kRowsAtOnce];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) lse[row] = log_sum(sums_[row]);
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) is_bad |= write(row, first + row * step, lse[row], lists);
    return is_bad;
  }

 private:
  static constexpr uint64_t kNoSum = 0xff800000;  // sum_word({-INFINITY, 0.0f})
  static constexpr int kLists = 32 / kWidth;  // in a register
  static constexpr int kChunksAtOnce = kLists * kRegisters;

  // Waits for the words of some chunks, from `chunk` on, which are in flight together, and clears them; merges them with the
  // best so far. What lies behind the row's last chunk is read, too, as a condition would hold up the loads behind it; it is
  // another row's, or behind them all, and does not count.
  __device__ void take(int chunk) {
    const int num_left = mail_.num_chunks - chunk;
    const bool has_sum = lane_ < min(num_left, kChunksAtOnce);
    const auto is_chunk = [&](int i) { return i * kLists + lane_ / kWidth < num_left; };
    uint64_t *key_places[kRowsAtOnce], *sum_places[kRowsAtOnce];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      key_places[row] = mail_.keys + ((first_[row] + chunk) * kWidth + lane_);  // and each 32 words on
      sum_places[row] = mail_.sums + (first_[row] + chunk + lane_);
    }
    uint64_t keys[kRowsAtOnce][kRegisters + 1], sums[kRowsAtOnce];
    uint32_t others = has_sum ? 0 : 1u << kRegisters;  // bits of what does not count
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) others |= is_chunk(i) ? 0 : 1u << i;
    uint32_t least;  // 0 while a word has not come; no condition here either
    do {
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        sums[row] = look(sum_places[row]);
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) keys[row][i] = look(key_places[row] + 32 * i);
      }
      least = 1;
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        least = min(least, any_bits(sums[row]) | (others >> kRegisters & 1));
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) least = min(least, any_bits(keys[row][i]) | (others >> i & 1));
      }
      if (least == 0) wait_a_little();
    } while (__any_sync(kWholeWarp, least == 0));
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      if (has_sum) *sum_places[row] = 0;
      sums_[row] = join(sums_[row], word_sum(has_sum ? sums[row] : kNoSum));
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) {
        if (is_chunk(i))
          key_places[row][32 * i] = 0;
        else
          keys[row][i] = kNothing;
      }
      keys[row][kRegisters] = best_[row];
    }
    // Neighbours first, then those two apart, and so on: the first has all in the end.
#pragma unroll
    for (int apart = 1; apart <= kRegisters; apart <<= 1)
#pragma unroll
      for (int i = 0; i + apart <= kRegisters; i += 2 * apart)
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) keys[row][i] = merge(keys[row][i], keys[row][i + apart], kWidth - 1);
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) best_[row] = keys[row][0];
  }

  // Of two sorted lists the best, sorted; the other one's lanes are reached backwards by `mirror`.
  __device__ uint64_t merge(uint64_t own, uint64_t others, int mirror) const {
    others = exchange(others, mirror);
    uint64_t best = own > others ? own : others;
#pragma unroll
    for (int step = kWidth / 2; step > 0; step >>= 1) {
      const uint64_t other = exchange(best, step);
      best = (best > other) == ((lane_ & step) == 0) ? best : other;
    }
    return best;
  }

  // Of a row that there is: its candidates, and whether it is bad.
  __device__ bool write(int row, int depth, float lse, const DraftLists& lists) const {
    if (depth >= mail_.num_depths) return false;
    const bool is_bad = is_bad_sum(sums_[row]);
    if (lane_ < mail_.top_k) {
      const uint64_t key = best_[row];
      const float cost = fabsf(child_log_prob(key_score(key), lse));
      lists.costs[depth * lists.stride + lane_] = is_bad || key <= kNothing ? __uint_as_float(kNoCost) : cost;
      lists.ids[depth * lists.stride + lane_] = key_node(key);
    }
    return is_bad;
  }

  __device__ static uint32_t any_bits(uint64_t word) { return static_cast<uint32_t>(word >> 32) | static_cast<uint32_t>(word); }

  const ChunkMail& mail_;
  const int lane_;
  int first_[kRowsAtOnce];  // of the row's chunks, among those of the batch row
  uint64_t best_[kRowsAtOnce];
  ExpSum sums_[kRowsAtOnce];
};

// A warp's rows of a block. Returns whether one of them is bad.
template <int kWidth>
__device__ __forceinline__ bool merge_lists(const ChunkMail& mail, const DraftLists& lists) {
  bool is_bad = false;
#pragma unroll 1
  for (int first = warp_index(); first < mail.num_depths; first += kRowsAtOnce * kDraftWarps)
    is_bad |= RowMerge<kWidth>(mail).run(first, kDraftWarps, lists);
  return is_bad;
}

// kIsWide: for a top_k above 8, whose lists are longer; in kernels of their own, since they take registers.
template <bool kIsWide>
__device__ __forceinline__ bool merge_rows(const ChunkMail& mail, const DraftLists& lists) {
  if (!kIsWide) return merge_lists<8>(mail, lists);
  return mail.top_k <= 16 ? merge_lists<16>(mail, lists) : merge_lists<32>(mail, lists);
}

}  // namespace flashtrie
#endif
