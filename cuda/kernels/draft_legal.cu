// Draft trees held to a token trie or to token masks: one block a batch row, one level after the other.
//
// Within a level the nodes of the best tree come in the order (cost, place of the parent in its level, rank among its
// children), and no level needs more than the best N of them. So a level's nodes are expanded together, a warp each, the
// candidates are sorted by that order and cut, and at last the levels, which are sorted, are merged into one order.
//
// Reads a node: its line and louds words, the labels of its children (or two words of the masks' rows and its entries),
// and one logit for each: all of them, so that no legal token is lost to top_k. Nodes beyond the N best found so far are
// not expanded.
#include "../flashtrie/draft_mail.cuh"
#include "../flashtrie/draft_rules.cuh"

namespace flashtrie {

constexpr uint32_t kWideFanOut = 1024;  // children from which on the whole block gathers for one node
constexpr uint32_t kIsLastListed = 1;   // flags of a level's node: its parent has more legal tokens than top_k, and this
constexpr uint32_t kHasBadLogit = 2;    // is the last one listed; one of its children's logits is NaN or +inf

struct LevelNode {
  float cost;
  uint32_t parent;  // place in the level above
  uint32_t token;
  uint32_t state;
  uint32_t flags;
  uint32_t index;  // in the tree, once picked
};

struct LegalCandidate {
  uint32_t token, state, flags;
};

template <typename Rules>
struct LegalParams {
  DraftSizes sizes;
  DraftOutputs out;
  DraftConstraint<Rules> constraint;
  const void* logits;
  const int32_t* roots;
  const int32_t* base_lengths;
  uint64_t* chunk_sums;        // [B, depths, chunks] words of ExpSum of whole rows, zero afterwards; null to renormalise
  LevelNode* levels;           // [B, depths + 1, N]
  LegalCandidate* candidates;  // [B, N, top_k] of the level at hand
  int32_t num_chunks;
};

// Kept keys (logit, drafter's id), each with the number of its token among the legal ones, and room to sort them into.
struct LegalList {
  uint64_t* keys;     // [kMergeStride]
  uint32_t* numbers;  // [kMergeStride]

  // One warp: the top_k best of the first n, sorted to the front; returns how many. Keys are unique, but for zeros, which
  // are none and may lie anywhere among the n.
  __device__ int keep_best(int n, int num_keys, int top_k, int lane) const {
#pragma unroll 1
    for (int i = lane; i < n; i += 32) {
      const int rank = keys[i] == 0 ? n : rank_among(keys, n, keys[i]);
      if (rank >= top_k) continue;
      keys[kMergeCapacity + rank] = keys[i];
      numbers[kMergeCapacity + rank] = numbers[i];
    }
    __syncwarp();
    const int num_kept = min(num_keys, top_k);
    if (lane < num_kept) {
      keys[lane] = keys[kMergeCapacity + lane];
      numbers[lane] = numbers[kMergeCapacity + lane];
    }
    __syncwarp();
    return num_kept;
  }
};

// What a gather over legal tokens finds.
struct Gathered {
  ExpSum sum;
  uint32_t num_finite;
  int num_kept;  // at the front of the list, descending
  bool is_bad;
};

// One warp: legal tokens begin to end - 1 of a node.
template <typename T, typename Rules>
__device__ __noinline__ Gathered gather_legal(const DraftConstraint<Rules>& constraint, const typename Rules::Legal& legal,
                                              uint32_t begin, uint32_t end, const T* row, const DraftSizes& sizes,
                                              const LegalList& list) {
  constexpr int kStep = 4;  // tokens a lane has in flight
  const int lane = threadIdx.x & 31;
  ExpSum part{-INFINITY, 0.0f};
  uint32_t num_finite = 0, bound = 0;
  bool is_bad = false;
  int listed = 0;
#pragma unroll 1
  for (uint32_t first = begin; first < end; first += 32 * kStep) {
    float logits[kStep];
    uint32_t ids[kStep];
    float peak = -INFINITY;
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const uint32_t number = first + i * 32 + lane;
      ids[i] = number < end ? constraint.ids(constraint.rules.token(legal, number)) : kNoNode;
      logits[i] = ids[i] < static_cast<uint32_t>(sizes.vocab_size) ? widen(row[ids[i]]) : -INFINITY;
      is_bad |= !is_good_logit(logits[i]);
      num_finite += logits[i] > -INFINITY ? 1 : 0;
      peak = fmaxf(peak, logits[i]);
    }
    const float base = exp_base(fmaxf(part.base, peak));
    part.sum *= fast_exp(part.base - base);
    part.base = fmaxf(part.base, peak);
#pragma unroll
    for (int i = 0; i < kStep; ++i) part.sum += fast_exp(logits[i] - base);
    bound = max(bound, group_bound(ordered_score(peak), sizes.top_k));
    if (listed > kMergeCapacity - 32 * kStep) {
      __syncwarp();
      listed = list.keep_best(listed, listed, sizes.top_k, lane);
      if (listed == sizes.top_k) bound = max(bound, static_cast<uint32_t>(list.keys[listed - 1] >> 32));
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const bool is_kept = logits[i] > -INFINITY && ordered_score(logits[i]) >= bound;
      const uint32_t votes = __ballot_sync(kWholeWarp, is_kept);
      if (is_kept) {
        const int at = listed + __popc(votes & lanes_below(lane));
        list.keys[at] = rank_key(logits[i], ids[i]);
        list.numbers[at] = first + i * 32 + lane;
      }
      listed += __popc(votes);
    }
  }
  __syncwarp();
  Gathered found;
  found.num_kept = list.keep_best(listed, listed, sizes.top_k, lane);
  found.sum = warp_join(part);
  for (int step = 16; step > 0; step >>= 1) num_finite += __shfl_xor_sync(kWholeWarp, num_finite, step);
  found.num_finite = num_finite;
  found.is_bad = __any_sync(kWholeWarp, is_bad);
  return found;
}

struct LegalShared {
  uint64_t keys[kDraftWarps][kMergeStride];
  uint32_t numbers[kDraftWarps][kMergeStride];
  uint64_t wide_keys[kDraftWarps * kDraftMaxTopK];
  uint32_t wide_numbers[kDraftWarps * kDraftMaxTopK];
  Gathered wide_parts[kDraftWarps];
  uint32_t wide_nodes[kDraftMaxNodes];
  uint32_t num_wide;
  uint32_t num_candidates;
  float best[2][kDraftMaxNodes];  // the smallest costs found so far, ascending; by turns
  DraftOrigin origins[kDraftMaxNodes];
  uint32_t masks[kDraftMaxNodes * kDraftMaxNodes / 32];
  float sums[kDraftMaxNodes];  // log-sum-exp of each depth's row, NaN for a bad one
  uint32_t taken[kDraftMaxNodes];
  int is_bad;
  int valid;
  int is_truncated;
};

static_assert((sizeof(LegalShared) + 15) / 16 * 16 == 46272, "LEGAL_BYTES of cuda_draft_layout.py");

template <typename T, typename Rules>
class LegalBuild {
 public:
  __device__ LegalBuild(const LegalParams<Rules>& params, LegalShared& shared, uint64_t* sorted)
      : params_(params),
        sizes_(params.sizes),
        shared_(shared),
        sorted_(sorted),
        batch_(blockIdx.x),
        lane_(threadIdx.x & 31),
        warp_(threadIdx.x >> 5),
        depths_(params.sizes.num_depths()),
        levels_(params.levels + batch_ * (depths_ + 1) * params.sizes.num_nodes),
        candidates_(params.candidates + batch_ * params.sizes.num_nodes * params.sizes.top_k) {}

  __device__ void run() {
    start();
    int num_levels = 1, count = 1, num_best = 1, turn = 0;
    for (int depth = 0; depth < depths_ && count > 0; ++depth) {
      expand(depth, count);
      sort(static_cast<int>(shared_.num_candidates));
      count = keep(depth, num_best, turn);
      if (count > 0) num_levels = depth + 2;
    }
    __syncthreads();
    if (warp_ == 0) merge(num_levels);
    __syncthreads();
    write();
  }

 private:
  using Legal = typename Rules::Legal;

  __device__ LevelNode* level(int depth) const { return levels_ + static_cast<int64_t>(depth) * sizes_.num_nodes; }

  __device__ const T* row(int depth) const {
    return static_cast<const T*>(params_.logits) +
           (batch_ * sizes_.block_size + sizes_.first_row + depth) * static_cast<int64_t>(sizes_.vocab_size);
  }

  __device__ void start() {
    if (threadIdx.x == 0) {
      const uint32_t* starts = params_.constraint.start_states;
      level(0)[0] = {0.0f, 0, 0, starts ? starts[batch_] : 0, 0, 0};
      shared_.best[0][0] = 0.0f;
      shared_.is_bad = 0;
      shared_.is_truncated = 0;
      shared_.num_wide = 0;
      shared_.num_candidates = 0;
    }
    __syncthreads();
    if (params_.chunk_sums == nullptr) return;
    for (int depth = warp_; depth < depths_; depth += kDraftWarps) {
      const ExpSum joined =
          take_sums(params_.chunk_sums + (batch_ * depths_ + depth) * params_.num_chunks, params_.num_chunks, lane_);
      const bool is_bad = is_bad_sum(joined);
      if (lane_ == 0) {
        shared_.sums[depth] = is_bad ? NAN : log_sum(joined);
        if (is_bad) shared_.is_bad = 1;
      }
    }
    __syncthreads();
  }

  // Candidates of all nodes of one level: details into the workspace, keys (cost, node, rank) to be sorted.
  __device__ void expand(int depth, int count) {
    if (params_.chunk_sums == nullptr || shared_.sums[depth] == shared_.sums[depth]) {
      for (int node = warp_; node < count; node += kDraftWarps) {
        const Legal legal = legal_of(depth, node);
        if (legal.count() > kWideFanOut) {
          if (lane_ == 0) shared_.wide_nodes[atomicAdd(&shared_.num_wide, 1u)] = node;
          continue;
        }
        offer(depth, node, legal, gather_legal(params_.constraint, legal, 0, legal.count(), row(depth), sizes_, list()));
      }
      __syncthreads();
      for (uint32_t i = 0; i < shared_.num_wide; ++i) expand_wide(depth, static_cast<int>(shared_.wide_nodes[i]));
    }
    __syncthreads();
    if (threadIdx.x == 0) shared_.num_wide = 0;
  }

  __device__ Legal legal_of(int depth, int node) const {
    return params_.constraint.rules.legal(level(depth)[node].state);
  }

  __device__ LegalList list() const { return {shared_.keys[warp_], shared_.numbers[warp_]}; }

  // The warps share a node's tokens; then one of them merges what they kept.
  __device__ void expand_wide(int depth, int node) {
    const Legal legal = legal_of(depth, node);
    const uint32_t share = (legal.count() + kDraftWarps - 1) / kDraftWarps;
    const uint32_t begin = min(warp_ * share, legal.count()), end = min(begin + share, legal.count());
    const LegalList list = this->list();
    const Gathered part = gather_legal(params_.constraint, legal, begin, end, row(depth), sizes_, list);
    if (lane_ == 0) shared_.wide_parts[warp_] = part;
    if (lane_ < sizes_.top_k) {
      shared_.wide_keys[warp_ * sizes_.top_k + lane_] = lane_ < part.num_kept ? list.keys[lane_] : 0;
      shared_.wide_numbers[warp_ * sizes_.top_k + lane_] = list.numbers[lane_];
    }
    __syncthreads();
    if (warp_ == 0) {
      const int num_keys = kDraftWarps * sizes_.top_k;
      for (int i = lane_; i < num_keys; i += 32) {
        list.keys[i] = shared_.wide_keys[i];
        list.numbers[i] = shared_.wide_numbers[i];
      }
      __syncwarp();
      Gathered found = shared_.wide_parts[lane_ % kDraftWarps];
      const ExpSum sum = lane_ < kDraftWarps ? found.sum : ExpSum{-INFINITY, 0.0f};
      found.is_bad = __any_sync(kWholeWarp, found.is_bad);
      found.sum = warp_join(sum);
      for (int step = 1; step < kDraftWarps; step <<= 1)
        found.num_finite += __shfl_xor_sync(kWholeWarp, found.num_finite, step);
      int num_kept = lane_ < kDraftWarps ? shared_.wide_parts[lane_].num_kept : 0;
      for (int step = 16; step > 0; step >>= 1) num_kept += __shfl_xor_sync(kWholeWarp, num_kept, step);
      found.num_kept = list.keep_best(num_keys, num_kept, sizes_.top_k, lane_);
      offer(depth, node, legal, found);
    }
    __syncthreads();
  }

  // One warp: a node's candidates from the front of its list.
  __device__ void offer(int depth, int node, const Legal& legal, const Gathered& found) {
    LevelNode& parent = level(depth)[node];
    if (found.is_bad) {
      if (lane_ == 0) parent.flags |= kHasBadLogit;
      return;
    }
    const float lse = params_.chunk_sums ? shared_.sums[depth] : log_sum(found.sum);
    uint32_t first = 0;
    if (lane_ == 0) first = atomicAdd(&shared_.num_candidates, static_cast<uint32_t>(found.num_kept));
    first = __shfl_sync(kWholeWarp, first, 0);
    if (lane_ >= found.num_kept) return;
    const uint64_t key = shared_.keys[warp_][lane_];
    const uint32_t number = shared_.numbers[warp_][lane_], place = node * sizes_.top_k + lane_;
    const float cost = parent.cost + fabsf(child_log_prob(key_score(key), lse));
    const bool is_last = lane_ == sizes_.top_k - 1 && found.num_finite > static_cast<uint32_t>(sizes_.top_k);
    const Rules& rules = params_.constraint.rules;
    candidates_[place] = {rules.token(legal, number), rules.state(legal, number), is_last ? kIsLastListed : 0};
    sorted_[first + lane_] = static_cast<uint64_t>(__float_as_uint(cost)) << 32 | place;
  }

  // Bitonic, ascending, in shared memory; the keys are unique, so their first order does not matter.
  __device__ void sort(int count) {
    int places = 2;
    while (places < count) places <<= 1;
    for (int i = count + threadIdx.x; i < places; i += kDraftThreads) sorted_[i] = ~uint64_t(0);
    __syncthreads();
    for (int size = 2; size <= places; size <<= 1)
      for (int step = size >> 1; step > 0; step >>= 1) {
        for (int i = threadIdx.x; i < places / 2; i += kDraftThreads) {
          const int low = (i / step) * 2 * step + i % step, high = low + step;
          const uint64_t a = sorted_[low], b = sorted_[high];
          const bool ascends = (low & size) == 0;
          if ((a > b) == ascends) {
            sorted_[low] = b;
            sorted_[high] = a;
          }
        }
        __syncthreads();
      }
  }

  __device__ static float cost_of(uint64_t key) { return __uint_as_float(static_cast<uint32_t>(key >> 32)); }

  // Of the sorted candidates those that the tree can need become the next level; returns how many.
  __device__ int keep(int depth, int& num_best, int& turn) {
    const int found = min(static_cast<int>(shared_.num_candidates), sizes_.num_nodes - depth - 1);
    const float* best = shared_.best[turn];
    float* merged = shared_.best[turn ^ 1];
    for (int i = threadIdx.x; i < num_best; i += kDraftThreads) {
      const int at = i + below(found, [&](int j) { return cost_of(sorted_[j]) < best[i]; });
      if (at < sizes_.num_nodes) merged[at] = best[i];
    }
    for (int j = threadIdx.x; j < found; j += kDraftThreads) {
      const float cost = cost_of(sorted_[j]);
      const int at = j + below(num_best, [&](int i) { return best[i] <= cost; });
      if (at < sizes_.num_nodes) merged[at] = cost;
    }
    num_best = min(num_best + found, sizes_.num_nodes);
    turn ^= 1;
    __syncthreads();
    const float limit = num_best == sizes_.num_nodes ? merged[num_best - 1] : INFINITY;
    const int kept = below(found, [&](int j) { return cost_of(sorted_[j]) <= limit; });
    for (int j = threadIdx.x; j < kept; j += kDraftThreads) {
      const uint32_t place = static_cast<uint32_t>(sorted_[j]);
      const LegalCandidate& from = candidates_[place];
      level(depth + 1)[j] = {cost_of(sorted_[j]), place / sizes_.top_k, from.token, from.state, from.flags, 0};
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      shared_.num_candidates = 0;
      shared_.taken[depth + 1] = static_cast<uint32_t>(kept);  // for now, how many there are
    }
    __syncthreads();
    return kept;
  }

  // How many of the first places 0 .. count - 1 fulfil a condition that the later ones do not.
  template <typename Condition>
  __device__ static int below(int count, const Condition& condition) {
    int low = 0, high = count;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (condition(middle))
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  // One warp merges the sorted levels: the cheapest head whose parent is in the tree, ties to the lowest parent. A level's
  // nodes are taken in its order, so a head's parent is in the tree if enough of the level above are taken.
  __device__ void merge(int num_levels) {
    constexpr int kSlots = kDraftMaxNodes / 32;
    uint32_t counts[kSlots], heads[kSlots];
    for (int slot = 0; slot < kSlots; ++slot) {
      const int depth = slot * 32 + lane_;
      counts[slot] = depth > 0 && depth < num_levels ? shared_.taken[depth] : 0;
      heads[slot] = 0;
    }
    __syncwarp();
    for (int depth = lane_; depth < num_levels; depth += 32) shared_.taken[depth] = depth == 0 ? 1 : 0;
    __syncwarp();
    uint32_t flags = level(0)[0].flags;
    int valid = 1;
    for (; valid < sizes_.num_nodes; ++valid) {
      uint64_t best = ~uint64_t(0);  // cost, then the parent's index
      int from = 0;
      for (int slot = 0; slot * 32 < num_levels; ++slot) {
        const int depth = slot * 32 + lane_;
        if (heads[slot] >= counts[slot]) continue;
        const LevelNode& head = level(depth)[heads[slot]];
        if (head.parent >= shared_.taken[depth - 1]) continue;
        const uint64_t key =
            static_cast<uint64_t>(__float_as_uint(head.cost)) << 32 | level(depth - 1)[head.parent].index;
        if (key < best) {
          best = key;
          from = slot;
        }
      }
      const uint32_t cost = warp_min(static_cast<uint32_t>(best >> 32));
      if (cost == ~0u) break;
      const uint32_t mine = static_cast<uint32_t>(best >> 32) == cost ? static_cast<uint32_t>(best) : ~0u;
      const uint32_t parent = warp_min(mine);
      __syncwarp();
      // Two levels never offer the same parent's children, so one lane alone is meant.
      if (mine == parent && mine != ~0u) {
        const int depth = from * 32 + lane_;
        LevelNode& head = level(depth)[heads[from]];
        head.index = static_cast<uint32_t>(valid);
        flags |= head.flags;
        shared_.origins[valid] = {parent, static_cast<uint32_t>(depth) << 16 | heads[from]};
        shared_.taken[depth] = ++heads[from];
      }
      __syncwarp();
    }
    const bool is_truncated = __any_sync(kWholeWarp, flags & kIsLastListed);
    const bool is_bad = __any_sync(kWholeWarp, flags & kHasBadLogit);
    if (lane_ != 0) return;
    shared_.valid = valid;
    shared_.is_truncated = is_truncated;
    if (is_bad) shared_.is_bad = 1;
  }

  __device__ void write() {
    const int valid = shared_.valid;
    collect_masks(sizes_, valid, shared_.masks, [&](uint32_t node) { return shared_.origins[node].parent; });
    write_nodes(
        sizes_, params_.out, batch_, params_.roots[batch_], params_.base_lengths[batch_], valid,
        [&](int i) {
          const DraftOrigin origin = shared_.origins[i];
          const int depth = static_cast<int>(origin.place >> 16);
          const LevelNode& node = level(depth)[origin.place & 0xffff];
          return DraftNode{static_cast<int32_t>(node.token), depth, static_cast<int32_t>(origin.parent), node.cost,
                           node.state};
        },
        level(0)[0].state);
    __syncthreads();
    write_masks(sizes_, params_.out, batch_,
                [&](int i, int word) { return shared_.masks[i * sizes_.mask_words() + word]; });
    if (threadIdx.x == 0)
      params_.out.status[batch_] =
          (shared_.is_bad ? kDraftBadRow : 0) | (shared_.is_truncated ? kDraftTruncated : 0);
  }

  const LegalParams<Rules>& params_;
  const DraftSizes& sizes_;
  LegalShared& shared_;
  uint64_t* sorted_;
  const int64_t batch_;
  const int lane_, warp_, depths_;
  LevelNode* levels_;
  LegalCandidate* candidates_;
};

template <typename T, typename Rules>
__device__ __forceinline__ void build_legal(const LegalParams<Rules>& params, unsigned char* memory) {
  LegalShared& shared = *reinterpret_cast<LegalShared*>(memory);
  uint64_t* sorted = reinterpret_cast<uint64_t*>(memory + (sizeof(LegalShared) + 15) / 16 * 16);
  LegalBuild<T, Rules>(params, shared, sorted).run();
}

}  // namespace flashtrie

#if defined(__CUDACC__)
extern __shared__ __align__(16) unsigned char shared_memory[];

#define FT_LEGAL_KERNEL(name, T, Rules)                                        \
  extern "C" __global__ void __launch_bounds__(flashtrie::kDraftThreads)       \
      name(const __grid_constant__ flashtrie::LegalParams<Rules> params) {     \
    flashtrie::build_legal<T>(params, shared_memory);                          \
  }

FT_LEGAL_KERNEL(draft_legal_float32, float, flashtrie::TrieRules)
FT_LEGAL_KERNEL(draft_legal_float16, __half, flashtrie::TrieRules)
FT_LEGAL_KERNEL(draft_legal_bfloat16, flashtrie::Bfloat16, flashtrie::TrieRules)
FT_LEGAL_KERNEL(draft_masked_float32, float, flashtrie::MaskRules)
FT_LEGAL_KERNEL(draft_masked_float16, __half, flashtrie::MaskRules)
FT_LEGAL_KERNEL(draft_masked_bfloat16, flashtrie::Bfloat16, flashtrie::MaskRules)
#endif
