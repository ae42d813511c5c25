// Draft trees in one launch.
//
// A row of logits is cut into equal tiles of at most 8,192; a chunk is one or a few tiles in turn. Every block reads one
// chunk once, 16 bytes a load and a tile's loads all in flight together, and leaves the chunk's top_k values and its sum
// of exponentials in the workspace. The block that comes last for a batch row merges the chunks of its rows, a warp each
// and only of the depths that the tree reaches, grows the tree level by level and writes all outputs.
//
// Reads a batch row: (block - 1) V logits once; from L2 the workspace, 8 top_k + 8 bytes a chunk.
#include <float.h>

#include "../flashtrie/draft_pack.cuh"
#include "../flashtrie/draft_pick.cuh"

namespace flashtrie {

constexpr int kBlocksAtOnce = 4;         // of a multiprocessor: 64 registers a thread hold a tile without spilling
constexpr int kStagedThreads = 128;      // threads with values that reach the bound: 9 a tile on average for top_k 8
constexpr int kListCapacity = 1024;      // those values
constexpr float kMostAboveBase = 64.0f;  // exponentials stay below e^64 of where their sum is based
constexpr int kMostPicked = 32;          // nodes up to which a deep tree is picked
constexpr int kFewLevels = 5;            // that growing adds in less time

struct DraftParams {
  DraftSizes sizes;
  DraftOutputs out;
  const char* rows;      // the logits of depth 1 of the first batch row
  int64_t row_bytes;
  int64_t block_bytes;   // from one batch row to the next
  const int32_t* roots;
  const int32_t* base_lengths;
  const int32_t* vocab_map;
  uint64_t* chunk_keys;  // [B, depths, chunks, top_k] rank keys (logit, id), descending; 0: none
  ExpSum* chunk_sums;    // [B, depths, chunks]
  uint32_t* tickets;     // [B], zero before and after every launch, as are
  uint32_t* bad_rows;    // [B], set where a chunk holds NaN or +inf
  int32_t num_chunks;    // of a row
  int32_t num_tiles;     // of a row
  int32_t tile_packs;    // 16-byte packs of a tile; the last tile of a row may have fewer
  int32_t chunk_tiles;   // of a chunk; the last one of a row may have fewer
  int32_t list_capacity; // of growing
  int32_t sums_only;     // leave the chunks' sums in the workspace, and no tree
};

// What a thread holds of a tile: its packs, in ascending order of ids.
template <typename T>
struct TilePart {
  static constexpr int kLoads = Pack<T>::kLoads;
  uint4 packs[kLoads];
  int first_id;  // id of the first element of the first pack; may be negative

  __device__ int id(int load, int i) const { return first_id + load * kDraftThreads * Pack<T>::kCount + i; }
};

// Rows start anywhere, 16-byte loads do not: what a pack at the row's edge has outside counts as -inf and is not read.
template <typename T>
__device__ __noinline__ uint4 load_edge(const T* row, int vocab_size, int first) {
  constexpr int kCount = Pack<T>::kCount;
  const uint32_t blank = Pack<T>::kMinusInfinity;
  uint4 pack = make_uint4(blank, blank, blank, blank);
  T elements[kCount];
  memcpy(elements, &pack, sizeof pack);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (first + i >= 0 && first + i < vocab_size) elements[i] = row[first + i];
  memcpy(&pack, elements, sizeof pack);
  return pack;
}

template <typename T>
__device__ __forceinline__ TilePart<T> load_tile(const T* row, int vocab_size, int tile, int tile_packs) {
  constexpr int kCount = Pack<T>::kCount, kLoads = Pack<T>::kLoads;
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kCount);
  const int tile_first = tile * tile_packs * kCount - shift;
  const int thread = static_cast<int>(threadIdx.x);
  const uint32_t blank = Pack<T>::kMinusInfinity;
  TilePart<T> part;
  part.first_id = tile_first + thread * kCount;
  // Packs `begin` to `end` - 1 of this tile lie in the row whole.
  const int begin = tile_first < 0 ? 1 : 0, end = min(tile_packs, (vocab_size - tile_first) / kCount);
#pragma unroll
  for (int load = 0; load < kLoads; ++load) {
    const int pack = load * kDraftThreads + thread;
    part.packs[load] = make_uint4(blank, blank, blank, blank);
    if (pack < end && (load > 0 || pack >= begin))
      part.packs[load] = __ldcs(reinterpret_cast<const uint4*>(row + part.id(load, 0)));
  }
  if (begin > 0 || end < tile_packs) {  // one pack at each end of a row may be cut
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int pack = load * kDraftThreads + thread;
      if ((load == 0 && pack < begin) || (pack == end && pack < tile_packs))
        part.packs[load] = load_edge(row, vocab_size, part.id(load, 0));
    }
  }
  return part;
}

// Tiles first to last - 1 of a row, each of as many packs.
struct Chunk {
  int first, last, tile_packs;
};

struct ScanShared {
  alignas(16) uint4 staged[kStagedThreads][kThreadLogits / 4];  // of a 16-bit type half is used
  alignas(16) uint64_t list[kListCapacity];
  int staged_ids[kStagedThreads];
  uint32_t group_peaks[2][kDraftThreads / 8];  // by turns, so that one barrier a tile is enough
  uint32_t warp_totals[kDraftWarps];
  ExpSum warp_sums[kDraftWarps];
  uint32_t num_staged;
  uint32_t num_listed;
};

static_assert(kDraftThreads / 8 == 32, "a group of eight threads for each lane of a warp");
static_assert(sizeof(ScanShared) == 25456, "SCAN_BYTES of cuda_draft_layout.py");

__device__ __forceinline__ uint32_t block_total(ScanShared& shared, uint32_t warp_total, int warp, int lane) {
  __syncthreads();
  if (lane == 0) shared.warp_totals[warp] = warp_total;
  __syncthreads();
  uint32_t total = 0;
  for (int i = 0; i < kDraftWarps; ++i) total += shared.warp_totals[i];
  return total;
}

// When too many values reach the bound (long ties, or logits mostly masked): the exact top_k-th largest value bit by
// bit, then those above it in any order, and of its equals the lowest ids. Leaves exactly top_k keys in the list.
// Reads the chunk again and again; slow, and rare.
template <typename T>
__device__ __noinline__ void list_exactly(const T* row, int vocab_size, Chunk chunk, ScanShared& shared, int top_k) {
  constexpr int kCount = Pack<T>::kCount, kLoads = Pack<T>::kLoads;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t kth = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t trial = kth | 1u << bit;
    uint32_t count = 0;
#pragma unroll 1
    for (int tile = chunk.first; tile < chunk.last; ++tile) {
      const TilePart<T> part = load_tile(row, vocab_size, tile, chunk.tile_packs);
#pragma unroll 1
      for (int load = 0; load < kLoads; ++load)
        for (int i = 0; i < kCount; ++i) count += ordered_score(Pack<T>::get(part.packs[load], i)) >= trial ? 1 : 0;
    }
    for (int step = 16; step > 0; step >>= 1) count += __shfl_xor_sync(kWholeWarp, count, step);
    if (block_total(shared, count, warp, lane) >= static_cast<uint32_t>(top_k)) kth = trial;
  }
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
#pragma unroll 1
  for (int tile = chunk.first; tile < chunk.last; ++tile) {
    const TilePart<T> part = load_tile(row, vocab_size, tile, chunk.tile_packs);
#pragma unroll 1
    for (int load = 0; load < kLoads; ++load)
      for (int i = 0; i < kCount; ++i) {
        const float x = Pack<T>::get(part.packs[load], i);
        if (ordered_score(x) > kth) shared.list[atomicAdd(&shared.num_listed, 1u)] = rank_key(x, part.id(load, i));
      }
  }
  __syncthreads();
  uint32_t next = shared.num_listed;
#pragma unroll 1
  for (int tile = chunk.first; tile < chunk.last; ++tile) {
    const TilePart<T> part = load_tile(row, vocab_size, tile, chunk.tile_packs);
#pragma unroll 1
    for (int load = 0; load < kLoads && next < static_cast<uint32_t>(top_k); ++load) {
      uint32_t before = 0, total = 0;  // equals in lower lanes; in the warp
      for (int i = 0; i < kCount; ++i) {
        const uint32_t votes = __ballot_sync(kWholeWarp, ordered_score(Pack<T>::get(part.packs[load], i)) == kth);
        before += __popc(votes & lanes_below(lane));
        total += __popc(votes);
      }
      const uint32_t block_equals = block_total(shared, total, warp, lane);
      uint32_t at = next + before;
      for (int i = 0; i < warp; ++i) at += shared.warp_totals[i];
      for (int i = 0; i < kCount; ++i) {
        const float x = Pack<T>::get(part.packs[load], i);
        if (ordered_score(x) != kth) continue;
        if (at < static_cast<uint32_t>(top_k)) shared.list[at] = rank_key(x, part.id(load, i));
        ++at;
      }
      next += block_equals;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.num_listed = static_cast<uint32_t>(top_k);
  __syncthreads();
}

// One warp: a lower bound of the k-th largest of its lanes' values, which are not 0; the very one where no two are equal.
__device__ __forceinline__ uint32_t kth_largest(uint32_t value, int k) {
#pragma unroll 1
  for (int rank = 1; rank < k; ++rank) value = value == warp_max(value) ? 0 : value;
  return warp_max(value);
}

// The values of staged threads that reach the bound, into the block's list, by the whole block.
template <typename T>
__device__ __forceinline__ void list_staged(ScanShared& shared, int num_loads, float lowest) {
  constexpr int kCount = Pack<T>::kCount;
  const int num_values = num_loads * kCount, num_staged = static_cast<int>(shared.num_staged);
  const int value = threadIdx.x % kThreadLogits, load = value / kCount;
  if (value >= num_values) return;
#pragma unroll 1
  for (int from = threadIdx.x / kThreadLogits; from < num_staged; from += kDraftThreads / kThreadLogits) {
    const float x = widen(reinterpret_cast<const T*>(shared.staged[from])[value]);
    if (!(x >= lowest)) continue;
    const uint32_t place = atomicAdd(&shared.num_listed, 1u);
    const int id = shared.staged_ids[from] + load * kDraftThreads * kCount + value % kCount;
    if (place < kListCapacity) shared.list[place] = rank_key(x, id);
  }
}

// The block writes the top_k best of n keys, descending, then zeros; a group of lanes finds each key's rank.
__device__ __forceinline__ void write_best(const uint64_t* list, int n, int top_k, uint64_t* keys) {
  const int lanes = n <= kDraftThreads / 8 ? 8 : 1, own = threadIdx.x & (lanes - 1), step = kDraftThreads / lanes;
  const int at_first = static_cast<int>(threadIdx.x) / lanes;
#pragma unroll 1
  for (int base = 0; base < n; base += step) {
    const uint64_t key = list[min(base + at_first, n - 1)];
    const int rank = count_by_lanes(list, n, own, lanes, [&](uint64_t other) { return other > key; });
    if (own == 0 && base + at_first < n && rank < top_k) keys[rank] = key;
  }
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= n && rank < top_k) keys[rank] = 0;
}

// One block: top_k keys and the sum of exponentials of one chunk, into the workspace. A tile's exponentials are summed
// while its loads arrive; then the threads with values that reach the bound stage what they hold, and those values are
// listed. The bound comes from the first tile with enough logits above -inf. A warp's sum is based on the largest of its first logits, or of later ones if they are much larger.
template <typename T>
__device__ __forceinline__ void scan_chunk(const T* row, int vocab_size, Chunk chunk, ScanShared& shared, int top_k,
                                           uint64_t* keys, ExpSum* sum, uint32_t* bad_row) {
  constexpr int kCount = Pack<T>::kCount, kLoads = Pack<T>::kLoads;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x == 0) shared.num_staged = shared.num_listed = 0;
  float base = -INFINITY, sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float limit = -INFINITY, scaled_base = 0.0f;  // what follows from the base
  float lowest = -INFINITY;                     // the bound, once there is one
#pragma unroll 1
  for (int tile = chunk.first; tile < chunk.last; ++tile) {
    const TilePart<T> part = load_tile(row, vocab_size, tile, chunk.tile_packs);
    float peak = -INFINITY;
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (load * kDraftThreads >= chunk.tile_packs) break;
      const float pack_peak = Pack<T>::peak(part.packs[load]);
      peak = fmaxf(peak, pack_peak);
      if (__any_sync(kWholeWarp, pack_peak > limit)) {  // at first, and hardly ever again
        const float new_base = fmaxf(base, score_of(warp_max(ordered_score(fmaxf(pack_peak, -INFINITY)))));
        const float scale = fast_exp(base - new_base);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] *= scale;
        base = new_base;
        limit = base + kMostAboveBase;
        scaled_base = exp_base(base) * kLog2E;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i % 4] += exp_above(Pack<T>::get(part.packs[load], i), scaled_base);
    }
    if (!(lowest > -FLT_MAX)) {  // the same in the whole block
      uint32_t* peaks = shared.group_peaks[(tile - chunk.first) & 1];
      uint32_t group_peak = ordered_score(peak);
#pragma unroll
      for (int step = 1; step < 8; step <<= 1) group_peak = max(group_peak, __shfl_xor_sync(kWholeWarp, group_peak, step));
      if (lane % 8 == 0) peaks[threadIdx.x / 8] = group_peak;
      __syncthreads();
      lowest = fmaxf(score_of(kth_largest(peaks[lane], top_k)), -FLT_MAX);
    }
    if (!(peak >= lowest)) continue;
    const uint32_t at = atomicAdd(&shared.num_staged, 1u);
    if (at >= kStagedThreads) continue;
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
      if (load * kDraftThreads < chunk.tile_packs) shared.staged[at][load] = part.packs[load];
    shared.staged_ids[at] = part.first_id;
  }
  const float total = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (lane == 0) shared.warp_sums[warp] = {base, total};
  __syncthreads();
  const bool is_staged = shared.num_staged <= kStagedThreads;
  if (is_staged) list_staged<T>(shared, (chunk.tile_packs + kDraftThreads - 1) / kDraftThreads, lowest);
  __syncthreads();
  if (!is_staged || shared.num_listed > kListCapacity) list_exactly(row, vocab_size, chunk, shared, top_k);
  write_best(shared.list, static_cast<int>(shared.num_listed), top_k, keys);
  if (warp == kDraftWarps - 1) {
    const ExpSum joined = warp_join(lane < kDraftWarps ? shared.warp_sums[lane] : ExpSum{-INFINITY, 0.0f});
    if (lane == 0) *sum = joined;
    if (lane == 0 && bad_row && is_bad_sum(joined)) *bad_row = 1;
  }
}

// One warp: all chunks of one row of logits, a lane each at a time. Their best top_k keys and some more, at most
// kMergeCapacity, into `list`; returns how many, and the row's sum.
__device__ __forceinline__ int merge_chunks(const uint64_t* keys, const ExpSum* sums, int num_chunks, int top_k,
                                            uint64_t* list, int lane, ExpSum& joined) {
  constexpr int kStep = 4;  // ranks of a chunk loaded together; deeper ones are hardly ever needed
  const int num_groups = power_of_two_at_least(top_k);
  int listed = 0;
  uint32_t bound = 1;  // nothing is 0
  joined = {-INFINITY, 0.0f};
#pragma unroll 1
  for (int first = 0; first < num_chunks; first += 32) {
    const bool is_chunk = first + lane < num_chunks;
    const unsigned long long* mine =
        reinterpret_cast<const unsigned long long*>(keys) + static_cast<int64_t>(first + lane) * top_k;
    float2 sum = make_float2(-INFINITY, 0.0f);
    if (is_chunk) sum = __ldcg(reinterpret_cast<const float2*>(sums) + first + lane);
    uint64_t found[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) found[i] = is_chunk && i < top_k ? __ldcg(mine + i) : 0;
    bound = max(bound, group_bound(static_cast<uint32_t>(found[0] >> 32), num_groups));
#pragma unroll 1
    for (int rank = kStep;; rank += kStep) {
      if (listed > kMergeCapacity - 32 * kStep) {
        __syncwarp();
        listed = keep_best(list, listed, top_k, lane);
        bound = max(bound, static_cast<uint32_t>(list[top_k - 1] >> 32));
      }
      // A chunk's keys descend, so that those to keep are its first.
      uint32_t count = 0;
#pragma unroll
      for (int i = 0; i < kStep; ++i) count += static_cast<uint32_t>(found[i] >> 32) >= bound ? 1 : 0;
      uint32_t before = 0, total = 0;
#pragma unroll
      for (int bit = 0; bit < 3; ++bit) {
        const uint32_t votes = __ballot_sync(kWholeWarp, (count >> bit & 1) != 0);
        before += static_cast<uint32_t>(__popc(votes & lanes_below(lane))) << bit;
        total += static_cast<uint32_t>(__popc(votes)) << bit;
      }
#pragma unroll
      for (uint32_t i = 0; i < kStep; ++i)
        if (i < count) list[listed + before + i] = found[i];
      listed += static_cast<int>(total);
      const bool goes_on = count == kStep;
      if (rank >= top_k || !__any_sync(kWholeWarp, goes_on)) break;
#pragma unroll
      for (int i = 0; i < kStep; ++i) found[i] = goes_on && rank + i < top_k ? __ldcg(mine + rank + i) : 0;
    }
    const ExpSum chunks = warp_join({sum.x, sum.y});
    joined = first == 0 ? chunks : join(joined, chunks);
  }
  __syncwarp();
  return listed;
}

// One warp: the candidates of one row of logits, into shared memory. Called from several places, and too long for that.
__device__ __noinline__ void merge_row(const uint64_t* keys, const ExpSum* sums, int num_chunks, int top_k, uint64_t* list,
                                       float* costs, uint32_t* ids) {
  const int lane = threadIdx.x & 31;
  ExpSum joined;
  const int listed = merge_chunks(keys, sums, num_chunks, top_k, list, lane, joined);
  const bool is_bad = is_bad_sum(joined);
  const float lse = log_sum(joined);
  if (lane < top_k && (is_bad || lane >= listed)) costs[lane] = __uint_as_float(kNoCost);
  if (is_bad) return;
  const int log2_lanes = listed <= 16 ? 1 : 0, lanes = 1 << log2_lanes;
#pragma unroll 1
  for (int base = 0; base < listed; base += 32 >> log2_lanes) {
    const int at = base + (lane >> log2_lanes);
    const uint64_t key = list[min(at, listed - 1)];
    const int rank = count_by_lanes(list, listed, lane & (lanes - 1), lanes, [&](uint64_t other) { return other > key; });
    if (at >= listed || (lane & (lanes - 1)) != 0 || rank >= top_k) continue;
    costs[rank] = fabsf(child_log_prob(key_score(key), lse));
    ids[rank] = key_node(key);
  }
}

struct alignas(16) TreeShared {  // _TREE_SHARED_BYTES of cuda_draft_layout.py
  int is_last;
  int32_t root, base_length;
  int size;  // of a picked tree
};

// The last block of a batch row: chunks to candidate lists, lists to a tree, tree to outputs.
class Finish {
 public:
  __device__ Finish(const DraftParams& params, int64_t batch, TreeShared& tree, unsigned char* memory)
      : params_(params),
        tree_(tree),
        batch_(batch),
        depths_(params.sizes.num_depths()),
        space_(memory, params.sizes.num_nodes, params.list_capacity),
        growth_(space_, params.sizes.num_nodes, params.sizes.top_k) {
    lists_.stride = params.sizes.top_k + 2;
    lists_.costs = reinterpret_cast<float*>(space_.count + 1);
    lists_.ids = reinterpret_cast<uint32_t*>(lists_.costs + (depths_ + 2) * lists_.stride);
    unsigned char* behind = reinterpret_cast<unsigned char*>(lists_.ids + (depths_ + 2) * lists_.stride);
    behind_ = reinterpret_cast<uint64_t*>(memory + (behind - memory + 15) / 16 * 16);
  }

  __device__ void run() {
    merge_rows(0);
    if (threadIdx.x == 0) {
      copy_later(&tree_.root, params_.roots + batch_);
      copy_later(&tree_.base_length, params_.base_lengths + batch_);
      space_.keys[0] = space_.places[0] = 0;
    }
    clear_ends();
    __syncthreads();
    if (is_picked())
      pick();
    else if (depths_ > 0)
      grow();
    copies_are_there();
    __syncthreads();
    write();
  }

 private:
  // Level by level; the rows of levels that the tree does not reach are not merged.
  __device__ void grow() {
    growth_.add_children(lists_.costs);
#pragma unroll 1
    for (int depth = 1; depth < depths_; ++depth) {
      if (depth % kDraftWarps == 0) {
        merge_rows(depth);
        __syncthreads();
      }
      if (!growth_.add_level(lists_, depth)) break;
    }
  }

  // Node by node.
  __device__ void pick() {
#pragma unroll 1
    for (int depth = kDraftWarps; depth < depths_; depth += kDraftWarps) merge_rows(depth);
    __syncthreads();
    if (threadIdx.x < 32) tree_.size = pick_nodes(lists_, space_, params_.sizes.num_nodes);
    __syncthreads();
    growth_.take(tree_.size);
  }

  // Whether the tree is small and may well be deeper than kFewLevels. It is not if all nodes of the first two levels come
  // before the first one so deep, and are enough. The same in all threads.
  __device__ bool is_picked() const {
    const int num_nodes = params_.sizes.num_nodes, top_k = params_.sizes.top_k, stride = lists_.stride;
    if (num_nodes > kMostPicked || depths_ <= kFewLevels) return false;
    float deep = lists_.costs[0];
#pragma unroll
    for (int depth = 1; depth <= kFewLevels; ++depth) deep += lists_.costs[depth * stride];
    if (!(deep < INFINITY)) return false;  // there is none
    return 1 + top_k + top_k * top_k < num_nodes || !(lists_.costs[top_k - 1] + lists_.costs[stride + top_k - 1] <= deep);
  }

  // What lies behind the lists' rows, and behind the last of them.
  __device__ void clear_ends() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int depth = warp; depth < depths_ + 2; depth += kDraftWarps)
#pragma unroll 1
      for (int rank = lane + (depth < depths_ ? params_.sizes.top_k : 0); rank < lists_.stride; rank += 32)
        lists_.costs[depth * lists_.stride + rank] = __uint_as_float(kNoCost);
  }

  // Rows of kDraftWarps depths, a warp each.
  __device__ void merge_rows(int first) {
    const int warp = threadIdx.x >> 5, depth = first + warp;
    if (depth >= depths_) return;
    const int64_t row = batch_ * depths_ + depth;
    const int num_chunks = params_.num_chunks, top_k = params_.sizes.top_k;
    merge_row(params_.chunk_keys + row * num_chunks * top_k, params_.chunk_sums + row * num_chunks, num_chunks, top_k,
              behind_ + warp * kMergeStride, lists_.costs + depth * lists_.stride, lists_.ids + depth * lists_.stride);
  }

  __device__ void write() {
    const DraftSizes& sizes = params_.sizes;
    const int valid = growth_.size();
    uint32_t bad_row = 0;
    if (threadIdx.x == 0 && depths_ > 0) bad_row = __ldcg(params_.bad_rows + batch_);
    uint32_t* masks = reinterpret_cast<uint32_t*>(behind_);
    collect_masks(sizes, valid, masks, [&](uint32_t node) { return growth_.parent(node); });
    bool is_full = false;  // with its parent's last candidate in the tree, all the others are
    write_nodes(sizes, params_.out, batch_, tree_.root, tree_.base_length, valid, [&](int i) {
      const int place = static_cast<int>(growth_.place(i)), depth = place / lists_.stride;
      is_full |= place - depth * lists_.stride == sizes.top_k - 1;
      int32_t token = static_cast<int32_t>(lists_.ids[place]);
      if (params_.vocab_map) token = params_.vocab_map[token];
      return DraftNode{token, depth + 1, static_cast<int32_t>(growth_.parent(i)), growth_.cost(i), kNoNode};
    });
    const bool is_truncated = __syncthreads_or(is_full) && sizes.vocab_size > sizes.top_k;
    write_masks(sizes, params_.out, batch_, masks);
    if (threadIdx.x == 0) {
      params_.out.status[batch_] = (bad_row ? kDraftBadRow : 0) | (is_truncated ? kDraftTruncated : 0);
      if (bad_row) params_.bad_rows[batch_] = 0;
    }
  }

  const DraftParams& params_;
  TreeShared& tree_;
  const int64_t batch_;
  const int depths_;
  const GrowShared space_;
  TreeGrowth growth_;
  DraftLists lists_;
  uint64_t* behind_;  // the warps' merge lists, then the masks
};

// Numbers the callers 0 to count - 1 and starts anew. What the block wrote before its ticket is seen by the block with
// the last one; lighter than two __threadfence() around an atomicInc, which order more than this needs.
__device__ __forceinline__ uint32_t take_ticket(uint32_t* counter, uint32_t count) {
#if defined(__CUDA_ARCH__)
  uint32_t ticket;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(ticket)
               : "l"(counter), "r"(count - 1)
               : "memory");
#else
  const uint32_t ticket = *counter;
  *counter = ticket >= count - 1 ? 0 : ticket + 1;
#endif
  return ticket;
}

// Whether this block is the last of `count` to come by.
__device__ __forceinline__ bool is_last_block(uint32_t* counter, uint32_t count, TreeShared& tree) {
  __syncthreads();
  if (threadIdx.x == 0) tree.is_last = count == 1 || take_ticket(counter, count) == count - 1;
  __syncthreads();
  return tree.is_last != 0;
}

template <typename T>
__device__ __forceinline__ void build(const DraftParams& params, unsigned char* memory) {
  TreeShared& tree = *reinterpret_cast<TreeShared*>(memory);
  memory += sizeof(TreeShared);
  const DraftSizes& sizes = params.sizes;
  const uint32_t chunks = params.num_chunks, depths = sizes.num_depths();  // grid: chunks, depths, batch rows
  const int64_t batch = blockIdx.z;
  if (depths > 0) {  // a tree of one node has nothing to scan
    const uint32_t depth = blockIdx.y, chunk = blockIdx.x;
    const T* row = reinterpret_cast<const T*>(params.rows + batch * params.block_bytes + depth * params.row_bytes);
    const int64_t slot = (batch * depths + depth) * chunks + chunk;
    const int first_tile = static_cast<int>(chunk) * params.chunk_tiles;
    const Chunk tiles{first_tile, min(first_tile + params.chunk_tiles, params.num_tiles), params.tile_packs};
    scan_chunk(row, sizes.vocab_size, tiles, *reinterpret_cast<ScanShared*>(memory), sizes.top_k,
               params.chunk_keys + slot * sizes.top_k, params.chunk_sums + slot,
               params.sums_only ? nullptr : params.bad_rows + batch);
  }
  if (params.sums_only) return;
  if (depths > 0 && !is_last_block(params.tickets + batch, chunks * depths, tree)) return;
  Finish(params, batch, tree, memory).run();
}

}  // namespace flashtrie

#if defined(__CUDACC__)
extern __shared__ __align__(16) unsigned char shared_memory[];

extern "C" {
__global__ void __launch_bounds__(flashtrie::kDraftThreads, flashtrie::kBlocksAtOnce)
    draft_float32(const __grid_constant__ flashtrie::DraftParams params) {
  flashtrie::build<float>(params, shared_memory);
}
__global__ void __launch_bounds__(flashtrie::kDraftThreads, flashtrie::kBlocksAtOnce)
    draft_float16(const __grid_constant__ flashtrie::DraftParams params) {
  flashtrie::build<__half>(params, shared_memory);
}
__global__ void __launch_bounds__(flashtrie::kDraftThreads, flashtrie::kBlocksAtOnce)
    draft_bfloat16(const __grid_constant__ flashtrie::DraftParams params) {
  flashtrie::build<flashtrie::Bfloat16>(params, shared_memory);
}
}
#endif
