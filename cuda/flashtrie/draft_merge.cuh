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
  uint64_t* keys;  // [num_depths, num_chunks, chunk_keys(top_k)]
  uint64_t* sums;  // [num_depths, num_chunks]
  int num_depths, num_chunks, top_k;
};

constexpr int kRowsAtOnce = 2;  // of a warp

// One row's: keys of 32 chunks by rank and what is behind them, the best, and those of the chunks before.
struct RowShared {
  uint64_t dealt[kDealtKeys + 2][32];
  uint64_t best[kDraftMaxTopK];
  uint64_t carried[kDraftMaxTopK];
};

constexpr uint64_t kAskForMore = ~uint64_t(0);  // behind a lane's keys where there are more: above all keys

class RowMerge {
 public:
  __device__ RowMerge(const ChunkMail& mail, RowShared* shared) : mail_(mail), shared_(shared), lane_(threadIdx.x & 31) {}

  // One warp: depths first and first + step, if that is below num_depths. Returns whether one of them is bad.
  __device__ bool run(int first, int step, const DraftLists& lists) {
    ExpSum sums[kRowsAtOnce];
    // 32 chunks, then 31 at a time, as lane 0 has the best so far.
#pragma unroll 1
    for (int chunk = 0; chunk < mail_.num_chunks; chunk += chunk == 0 ? 32 : 31) {
      const int own = chunk == 0 ? lane_ : chunk + max(lane_, 1) - 1, last = mail_.num_chunks - 1;
      is_chunk_ = own <= last && (chunk == 0 || lane_ > 0);
      is_carried_ = chunk > 0 && lane_ == 0;
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const int depth = first + row * step;
        place_[row] = (depth < mail_.num_depths ? depth : first) * mail_.num_chunks + min(own, last);
      }
      ExpSum parts[kRowsAtOnce];
      deal(parts);
      WordPair rest[kRowsAtOnce][kDealtKeys / 2];
      if (mail_.top_k > kDealtKeys)
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) look_at(row, kDealtKeys, rest[row]);
      take(parts);
      if (mail_.top_k > kDealtKeys) clear_rest(rest);
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) sums[row] = chunk == 0 ? parts[row] : join(sums[row], parts[row]);
    }
    float lse[kRowsAtOnce];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) lse[row] = log_sum(sums[row]);
    bool is_bad = false;
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const int depth = first + row * step;
      if (depth >= mail_.num_depths) break;
      const bool is_bad_row = is_bad_sum(sums[row]);
      is_bad |= is_bad_row;
      if (lane_ >= mail_.top_k) continue;
      const uint64_t key = shared_[row].best[lane_];
      const float cost = fabsf(child_log_prob(key_score(key), lse[row]));
      lists.costs[depth * lists.stride + lane_] = is_bad_row || key <= kNothing ? __uint_as_float(kNoCost) : cost;
      lists.ids[depth * lists.stride + lane_] = key_node(key);
    }
    return is_bad;
  }

 private:
  // Waits for the first keys of all lanes, and for their sums, and clears them; the words of all rows are in flight together.
  // Lanes and rows without a chunk look at another one's of the same warp.
  __device__ void deal(ExpSum* parts) {
    uint64_t words[kRowsAtOnce];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) at_[row] = rank_[row] = 0;
    bool is_here;
    do {
      WordPair found[kRowsAtOnce][kDealtKeys / 2];
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        words[row] = look(mail_.sums + place_[row]);
        look_at(row, 0, found[row]);
      }
      is_here = true;
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) is_here = is_here & (words[row] != 0) & put(row, found[row]);
      if (!is_here) wait_a_little();
    } while (__any_sync(kWholeWarp, !is_here));
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      mail_.sums[place_[row]] = 0;
      clear(row, 0);
      parts[row] = is_chunk_ ? word_sum(words[row]) : ExpSum{-INFINITY, 0.0f};
      show(row);
    }
  }

  // Clears the keys behind the first, which may come late and which nobody may have looked at. `found`: as they were some time
  // ago.
  __device__ void clear_rest(WordPair (*found)[kDealtKeys / 2]) {
#pragma unroll 1
    for (int rank = kDealtKeys; rank < mail_.top_k; rank += kDealtKeys) {
      bool is_here = rank == kDealtKeys;
      while (true) {
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row)
#pragma unroll
          for (int i = 0; i < kDealtKeys / 2; ++i)
            is_here = is_here & (found[row][i].first != 0) & (found[row][i].second != 0);
        if (!__any_sync(kWholeWarp, !is_here)) break;
        if (!is_here) wait_a_little();
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) look_at(row, rank, found[row]);
        is_here = true;
      }
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) clear(row, rank);
    }
  }

  __device__ void clear(int row, int rank) const {
    uint64_t* keys = mail_.keys + place_[row] * chunk_keys(mail_.top_k) + rank;
#pragma unroll
    for (int i = 0; i < kDealtKeys; i += 2) clear_twice(keys + i);
  }

  // Keys from rank `rank` on, as they are now.
  __device__ void look_at(int row, int rank, WordPair* found) const {
    const uint64_t* keys = mail_.keys + place_[row] * chunk_keys(mail_.top_k) + rank;
#pragma unroll
    for (int i = 0; i < kDealtKeys / 2; ++i) found[i] = look_twice(keys + 2 * i);
  }

  // To shared memory; false if some have not come.
  __device__ bool put(int row, const WordPair* found) {
    bool is_here = true;
#pragma unroll
    for (int i = 0; i < kDealtKeys / 2; ++i) {
      is_here = is_here & (found[i].first != 0) & (found[i].second != 0);
      shared_[row].dealt[2 * i][lane_] = found[i].first;
      shared_[row].dealt[2 * i + 1][lane_] = found[i].second;
    }
    return is_here;
  }

  // The head of what has been put. The whole warp.
  __device__ void show(int row) {
    if (mail_.num_chunks > 32 && is_carried_)
#pragma unroll 1
      for (int i = 0; i < kDealtKeys; ++i) shared_[row].dealt[i][lane_] = shared_[row].carried[rank_[row] + i];
    const bool has_keys = is_chunk_ || is_carried_;
    shared_[row].dealt[kDealtKeys][lane_] = rank_[row] + kDealtKeys < mail_.top_k ? kAskForMore : 0;
    shared_[row].dealt[kDealtKeys + 1][lane_] = 0;
    head_[row] = has_keys ? shared_[row].dealt[at_[row]][lane_] : 0;
    next_[row] = has_keys ? shared_[row].dealt[at_[row] + 1][lane_] : 0;
  }

  // The top_k best of all lanes' keys, zeros behind them; and each row's sum of all lanes' in every lane. A step of the one
  // waits for votes while a step of the other waits for words.
  __device__ void take(ExpSum* parts) {
    float sums[kRowsAtOnce];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const float base = score_of(warp_max(ordered_score(parts[row].base)));
      sums[row] = parts[row].sum * fast_exp(parts[row].base - exp_base(base));
      parts[row].base = base;
      shared_[row].best[lane_] = 0;
    }
    __syncwarp();
    int step = 16;
#pragma unroll 1
    for (int rank = 0; rank < mail_.top_k; ++rank) {
      uint32_t most[kRowsAtOnce], votes[kRowsAtOnce];
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) most[row] = warp_max(score_word(row));
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const float others = __shfl_xor_sync(kWholeWarp, sums[row], step);
        sums[row] += step > 0 ? others : 0.0f;
      }
      step >>= 1;
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row)
        if (most[row] == static_cast<uint32_t>(kAskForMore >> 32)) most[row] = deal_more(row);
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row)  // nobody has a key of score 0
        votes[row] = __ballot_sync(kWholeWarp, score_word(row) == max(most[row], 1u));
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        const bool wins = (votes[row] & (lanes_below(lane_) | 1u << lane_)) == 1u << lane_;
        if (wins) shared_[row].best[rank] = head_[row];
        head_[row] = wins ? next_[row] : head_[row];
        at_[row] += wins ? 1 : 0;
        next_[row] = shared_[row].dealt[at_[row] + 1][lane_];
      }
    }
    for (; step > 0; step >>= 1)  // few were taken
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) sums[row] += __shfl_xor_sync(kWholeWarp, sums[row], step);
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) parts[row].sum = sums[row];
    __syncwarp();
    if (mail_.num_chunks <= 32) return;
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) shared_[row].carried[lane_] = shared_[row].best[lane_];
    __syncwarp();
  }

  // Lanes that have had all that were dealt get the next ones. Returns the best of the heads. The whole warp.
  __device__ uint32_t deal_more(int row) {
    bool waits = head_[row] == kAskForMore;
    if (waits) {
      rank_[row] += kDealtKeys;
      at_[row] = 0;
    }
    do {
      WordPair found[kDealtKeys / 2];
      if (waits) {
        look_at(row, rank_[row], found);
        waits = !put(row, found);
      }
      if (waits) wait_a_little();
    } while (__any_sync(kWholeWarp, waits));
    show(row);
    return warp_max(score_word(row));
  }

  __device__ uint32_t score_word(int row) const { return static_cast<uint32_t>(head_[row] >> 32); }

  const ChunkMail& mail_;
  RowShared* shared_;  // [kRowsAtOnce]
  const int lane_;
  bool is_chunk_, is_carried_;  // what the lane's keys are of
  int place_[kRowsAtOnce];      // of its chunk, among those of the batch row
  uint64_t head_[kRowsAtOnce], next_[kRowsAtOnce];
  int at_[kRowsAtOnce];    // of the head, among those that are dealt
  int rank_[kRowsAtOnce];  // of the first of them
};

}  // namespace flashtrie
#endif
