// Rows of logits from their chunks: the candidates of every depth, by the warps of one block (nvcc only).
//
// Contract: of each row its top_k best, descending, ties to the lower id; their costs against the row's log-sum-exp.
// A warp merges two rows in turns, so that the latency of one hides that of the other. A lane holds keys of a chunk. The
// chunks' best give a bound that few keys reach; those are listed, and each finds its rank by counting who comes before it.
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
  uint64_t* keys;  // [num_depths, chunk_keys(top_k) / 2, num_chunks, 2]
  uint64_t* sums;  // [num_depths, num_chunks]
  int num_depths, num_chunks, top_k;
  bool is_real;  // else nobody looks at what was sent, and words are made up: two rows of candidates and the others empty
};

constexpr int kRowsAtOnce = 2;     // of a warp
constexpr int kKeysUnchecked = 4;  // of a lane may be listed before it is seen whether they are many
constexpr int kMergeListed = kDraftMaxTopK + 32 * kKeysUnchecked;  // 12 are on average, for top_k 8 and 19 chunks

// One row's keys that may be among the best, in any order, and zeros behind them.
struct RowShared {
  alignas(16) uint64_t listed[kMergeListed];
  alignas(16) uint64_t best[kDraftMaxTopK];
  alignas(16) uint32_t scores[32];  // of one key of each chunk
};

class RowMerge {
 public:
  __device__ RowMerge(const ChunkMail& mail, RowShared* shared) : mail_(mail), shared_(shared), lane_(threadIdx.x & 31) {}

  // One warp: depths first and first + step, if that is below num_depths. Returns whether one of them is bad.
  __device__ bool run(int first, int step, const DraftLists& lists) {
    ExpSum sums[kRowsAtOnce];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const int depth = first + row * step;
      depth_[row] = depth < mail_.num_depths ? depth : first;
      num_listed_[row] = 0;
      bound_[row] = 0;
      clear_list(row);
    }
    __syncwarp();
#pragma unroll 1
    for (int chunk = 0; chunk < mail_.num_chunks; chunk += 32) {
      ExpSum parts[kRowsAtOnce];
      add_chunks(chunk, parts);
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) sums[row] = chunk == 0 ? parts[row] : join(sums[row], parts[row]);
    }
    find_best(shared_, max(num_listed_[0], num_listed_[1]), mail_.top_k);
    bool is_bad = false;
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const int depth = first + row * step;
      if (depth >= mail_.num_depths) break;
      const bool is_bad_row = is_bad_sum(sums[row]);
      is_bad |= is_bad_row;
      if (lane_ >= mail_.top_k) continue;
      const uint64_t key = shared_[row].best[lane_];
      const float cost = fabsf(child_log_prob(key_score(key), log_sum(sums[row])));
      lists.costs[depth * lists.stride + lane_] = is_bad_row || key == 0 ? __uint_as_float(kNoCost) : cost;
      lists.ids[depth * lists.stride + lane_] = key_node(key);
    }
    return is_bad;
  }

 private:
  // Lists what may be among the best of 32 chunks, and joins their sums.
  __device__ void add_chunks(int first, ExpSum* parts) {
    const int num_lanes = min(mail_.num_chunks - first, 32);
    chunk_ = min(first + lane_, mail_.num_chunks - 1);  // who has none looks at another one's
    // So many lanes' keys of this rank are enough keys for a bound.
    const int bound_rank = mail_.top_k <= num_lanes ? 0 : (mail_.top_k - 1) / num_lanes;
    const int num_wanted = bound_rank == 0 ? mail_.top_k : mail_.top_k / (bound_rank + 1) + 1;
#pragma unroll 1
    for (int rank = 0; rank < mail_.top_k; rank += kDealtKeys) {
      uint64_t keys[kRowsAtOnce][kDealtKeys];
      collect(rank, keys, parts);
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row)
#pragma unroll
        for (int i = 0; i < kDealtKeys; ++i)
          if (lane_ >= num_lanes) keys[row][i] = 0;
      if (rank == 0) {
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row)
          if (lane_ >= num_lanes) parts[row] = {-INFINITY, 0.0f};
        if (bound_rank < kDealtKeys) raise_bounds(keys, bound_rank, min(num_wanted, num_lanes));
        join_lanes(parts);
      }
      list(keys);
    }
  }

  // Waits for keys of all lanes from a rank on, with the first of them for the sums, and clears them; all words are in flight
  // together.
  __device__ void collect(int rank, uint64_t (*keys)[kDealtKeys], ExpSum* parts) const {
    uint64_t words[kRowsAtOnce];
    bool is_here;
    do {
      is_here = true;
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        if (rank == 0) words[row] = look(sum_at(row));
#pragma unroll
        for (int i = 0; i < kDealtKeys; i += 2) {
          const WordPair pair = look_twice(keys_at(row, rank + i));
          keys[row][i] = pair.first;
          keys[row][i + 1] = pair.second;
        }
      }
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        if (rank == 0) is_here = is_here & (words[row] != 0);
#pragma unroll
        for (int i = 0; i < kDealtKeys; ++i) is_here = is_here & (keys[row][i] != 0);
      }
      if (!is_here) wait_a_little();
    } while (mail_.is_real && __any_sync(kWholeWarp, !is_here));
    if (!mail_.is_real) make_up(rank, keys, words);
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      if (rank == 0) parts[row] = word_sum(words[row]);
      if (!mail_.is_real) continue;
      if (rank == 0) *sum_at(row) = 0;
#pragma unroll
      for (int i = 0; i < kDealtKeys; i += 2) clear_twice(keys_at(row, rank + i));
    }
  }

  // Words as they might come, of token 0: no key twice, since 97 and 32 have no common factor.
  __device__ void make_up(int rank, uint64_t (*keys)[kDealtKeys], uint64_t* words) const {
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      words[row] = sum_word({0.0f, 1.0f});
#pragma unroll
      for (int i = 0; i < kDealtKeys; ++i) {
        const float score = static_cast<float>(chunk_ * 32 + (rank + i) * 97) / -64.0f;
        keys[row][i] = depth_[row] < 2 && rank + i < mail_.top_k ? rank_key(score, 0) : kNothing;
      }
    }
  }

  __device__ uint64_t* sum_at(int row) const { return mail_.sums + depth_[row] * mail_.num_chunks + chunk_; }
  __device__ uint64_t* keys_at(int row, int rank) const {
    const int pair = depth_[row] * (chunk_keys(mail_.top_k) / 2) + rank / 2;
    return mail_.keys + (pair * mail_.num_chunks + chunk_) * 2;
  }

  // Bounds from the num_wanted-th largest of the lanes' keys of one rank.
  __device__ void raise_bounds(const uint64_t (*keys)[kDealtKeys], int rank, int num_wanted) {
    uint32_t own[kRowsAtOnce];
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      own[row] = score_word(keys[row][0]);
#pragma unroll
      for (int i = 1; i < kDealtKeys; ++i) own[row] = i == rank ? score_word(keys[row][i]) : own[row];
      shared_[row].scores[lane_] = own[row];
    }
    __syncwarp();
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const uint4* scores = reinterpret_cast<const uint4*>(shared_[row].scores);
      int greater[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint4 others = scores[i];
        greater[0] += (others.x > own[row] ? 1 : 0) + (others.y > own[row] ? 1 : 0);
        greater[1] += (others.z > own[row] ? 1 : 0) + (others.w > own[row] ? 1 : 0);
      }
      bound_[row] = max(bound_[row], warp_min(greater[0] + greater[1] < num_wanted ? own[row] : ~0u));
    }
  }

  // Each row's sum of all lanes' in every lane.
  __device__ void join_lanes(ExpSum* parts) const {
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const float base = score_of(warp_max(ordered_score(parts[row].base)));
      parts[row] = {base, parts[row].sum * fast_exp(parts[row].base - exp_base(base))};
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) parts[row].sum += __shfl_xor_sync(kWholeWarp, parts[row].sum, step);
  }

  // The lanes' keys, descending, that reach the bounds.
  __device__ void list(const uint64_t (*keys)[kDealtKeys]) {
#pragma unroll
    for (int i = 0; i < kDealtKeys; ++i) {
      if (i % kKeysUnchecked == 0 && max(num_listed_[0], num_listed_[1]) > kDraftMaxTopK) shorten();
      uint32_t votes[kRowsAtOnce];
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row)
        votes[row] = __ballot_sync(kWholeWarp, keys[row][i] > kNothing && score_word(keys[row][i]) >= bound_[row]);
      if ((votes[0] | votes[1]) == 0) break;
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        if (votes[row] >> lane_ & 1)
          shared_[row].listed[num_listed_[row] + __popc(votes[row] & lanes_below(lane_))] = keys[row][i];
        num_listed_[row] += __popc(votes[row]);
      }
    }
    __syncwarp();
  }

  // Lists with the best only, and bounds that they give.
  __device__ void shorten() {
    __syncwarp();
    find_best_apart(shared_, max(num_listed_[0], num_listed_[1]), mail_.top_k);
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) {
      const uint64_t own = shared_[row].best[lane_];
      clear_list(row);
      shared_[row].listed[lane_] = own;
      num_listed_[row] = min(num_listed_[row], mail_.top_k);
      bound_[row] = max(bound_[row], score_word(shared_[row].best[mail_.top_k - 1]));
    }
    __syncwarp();
  }

  // The top_k best of those listed in each row, at most `most`, descending, and zeros behind them. One warp.
  __device__ static __forceinline__ void find_best(RowShared* rows, int most, int top_k) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row) rows[row].best[lane] = 0;
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < most; first += 32) {
      uint64_t own[kRowsAtOnce];
      int ranks[kRowsAtOnce];
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row) {
        own[row] = rows[row].listed[first + lane];
        ranks[row] = 0;
      }
#pragma unroll 4
      for (int i = 0; i < most; i += 2)
#pragma unroll
        for (int row = 0; row < kRowsAtOnce; ++row) {
          const ulonglong2 others = reinterpret_cast<const ulonglong2*>(rows[row].listed)[i / 2];
          ranks[row] += (others.x > own[row] ? 1 : 0) + (others.y > own[row] ? 1 : 0);
        }
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row)
        if (own[row] != 0 && ranks[row] < top_k) rows[row].best[ranks[row]] = own[row];
    }
    __syncwarp();
  }

  // The same where it is seldom needed: what is needed always keeps its registers.
  __device__ static __noinline__ void find_best_apart(RowShared* rows, int most, int top_k) { find_best(rows, most, top_k); }

  __device__ void clear_list(int row) {
#pragma unroll
    for (int i = 0; i < kMergeListed; i += 32) shared_[row].listed[i + lane_] = 0;
  }

  __device__ static uint32_t score_word(uint64_t key) { return static_cast<uint32_t>(key >> 32); }

  const ChunkMail& mail_;
  RowShared* shared_;  // [kRowsAtOnce]
  const int lane_;
  int chunk_;  // the lane's
  int depth_[kRowsAtOnce];
  int num_listed_[kRowsAtOnce];
  uint32_t bound_[kRowsAtOnce];  // score words of keys that matter are no less
};

}  // namespace flashtrie
#endif
