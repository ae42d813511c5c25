// Rows of logits from their chunks: the candidates of every depth, by the warps of one block (nvcc only).
//
// Contract: of each row its top_k best, descending, ties to the lower id; their costs against the row's log-sum-exp.
// A warp merges two rows in turns, so that the latency of one hides that of the other. A lane holds the head of a chunk's
// keys, and the best head is taken top_k times; chunks lie in lanes by rising ids, so that the lowest lane wins a tie.
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
  const uint64_t* keys;  // [depths, chunks, top_k]
  const uint64_t* sums;  // [depths, chunks]
  int num_chunks, top_k;
};

constexpr int kRowsAtOnce = 2;  // of a warp
constexpr int kDealt = 8;       // keys of a chunk in shared memory at a time

// One row's: keys of 32 chunks by rank and two ends behind them, the best, and those of the chunks before.
struct RowShared {
  uint64_t dealt[kDealt + 2][32];
  uint64_t best[kDraftMaxTopK];
  uint64_t carried[kDraftMaxTopK];
};

class RowMerge {
 public:
  __device__ RowMerge(const ChunkMail& mail, RowShared* shared) : mail_(mail), shared_(shared), lane_(threadIdx.x & 31) {}

  // One warp: depths first and first + step, if that is below num_depths. Returns whether one of them is bad.
  __device__ bool run(int first, int step, int num_depths, const DraftLists& lists) {
    ExpSum sums[kRowsAtOnce];
    bool is_row[kRowsAtOnce];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) is_row[row] = first + row * step < num_depths;
#pragma unroll 1
    for (int chunk = 0; chunk < mail_.num_chunks; chunk += chunk == 0 ? 32 : 31) {
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) source_[row] = source(first + row * step, chunk, is_row[row]);
      ExpSum parts[kRowsAtOnce];
      deal(parts);
      take();
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const ExpSum joined = warp_join(parts[row]);
        sums[row] = chunk == 0 ? joined : join(sums[row], joined);
      }
    }
    bool is_bad = false;
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      if (!is_row[row]) break;
      const bool is_bad_row = is_bad_sum(sums[row]);
      is_bad |= is_bad_row;
      const float lse = log_sum(sums[row]);
      if (lane_ >= mail_.top_k) continue;
      const uint64_t key = shared_[row].best[lane_];
      const int at = (first + row * step) * lists.stride + lane_;
      const float cost = fabsf(child_log_prob(key_score(key), lse));
      lists.costs[at] = is_bad_row || key <= kNothing ? __uint_as_float(kNoCost) : cost;
      lists.ids[at] = key_node(key);
    }
    return is_bad;
  }

 private:
  // A lane's keys are those of a chunk, or of the best of the chunks before, or none.
  struct Source {
    const uint64_t* keys;  // null: no chunk
    const uint64_t* sum;
    bool is_carried;
  };

  __device__ Source source(int depth, int chunk, bool is_row) const {
    const bool is_carried = chunk > 0 && lane_ == 0;
    const int at = chunk == 0 ? lane_ : chunk + lane_ - 1;
    if (!is_row || is_carried || at >= mail_.num_chunks) return {nullptr, nullptr, is_carried};
    const int64_t slot = static_cast<int64_t>(depth) * mail_.num_chunks + at;
    return {mail_.keys + slot * mail_.top_k, mail_.sums + slot, false};
  }

  // Waits for the first keys of all lanes, and for their sums.
  __device__ void deal(ExpSum* parts) {
    bool is_here;
    do {
      is_here = true;
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const uint64_t word = source_[row].keys ? look(source_[row].sum) : sum_word({-INFINITY, 0.0f});
        is_here &= fill(row, 0) && word != 0;
        parts[row] = word_sum(word);
      }
      if (!is_here) wait_a_little();
    } while (__any_sync(kWholeWarp, !is_here));
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      shared_[row].dealt[kDealt][lane_] = shared_[row].dealt[kDealt + 1][lane_] = 0;
      dealt_[row] = 0;
      start(row);
    }
  }

  // Keys from rank `rank` on, as they are now, to shared memory; false if some have not come.
  __device__ bool fill(int row, int rank) {
    const Source& from = source_[row];
    uint64_t found[kDealt];
#pragma unroll
    for (int i = 0; i < kDealt; ++i) {
      found[i] = kNothing;
      if (from.keys && rank + i < mail_.top_k) found[i] = look(from.keys + rank + i);
    }
    bool is_here = true;
#pragma unroll
    for (int i = 0; i < kDealt; ++i) {
      is_here &= found[i] != 0;
      if (from.is_carried && rank + i < mail_.top_k) found[i] = shared_[row].carried[rank + i];
      shared_[row].dealt[i][lane_] = found[i];
    }
    return is_here;
  }

  __device__ void start(int row) {
    at_[row] = 0;
    head_[row] = shared_[row].dealt[0][lane_];
    next_[row] = shared_[row].dealt[1][lane_];
  }

  // The top_k best of all lanes' keys.
  __device__ void take() {
#pragma unroll 1
    for (int rank = 0; rank < mail_.top_k; ++rank) {
      uint32_t most[kRowsAtOnce], votes[kRowsAtOnce];
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) most[row] = warp_max(score_word(row));
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) votes[row] = __ballot_sync(kWholeWarp, score_word(row) == most[row]);
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const bool wins = (votes[row] & (lanes_below(lane_) | 1u << lane_)) == 1u << lane_;
        if (wins) shared_[row].best[rank] = head_[row];
        if (!wins || most[row] == 0) continue;  // 0: there is none left
        head_[row] = next_[row];
        ++at_[row];
        next_[row] = shared_[row].dealt[at_[row] + 1][lane_];
      }
      if (mail_.top_k > kDealt) deal_more();
    }
    __syncwarp();
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row)
      if (lane_ < mail_.top_k) shared_[row].carried[lane_] = shared_[row].best[lane_];
    __syncwarp();
  }

  // The next keys of lanes that have had all that were dealt.
  __device__ void deal_more() {
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      if (at_[row] < kDealt || dealt_[row] + kDealt >= mail_.top_k) continue;
      dealt_[row] += kDealt;
      while (!fill(row, dealt_[row])) wait_a_little();
      start(row);
    }
  }

  __device__ uint32_t score_word(int row) const { return static_cast<uint32_t>(head_[row] >> 32); }

  const ChunkMail& mail_;
  RowShared* shared_;  // [kRowsAtOnce]
  const int lane_;
  Source source_[kRowsAtOnce];
  uint64_t head_[kRowsAtOnce], next_[kRowsAtOnce];
  int at_[kRowsAtOnce];     // of the head, among those that are dealt
  int dealt_[kRowsAtOnce];  // rank of the first of them
};

}  // namespace flashtrie
#endif
