// One chunk of a row of logits by a whole block (nvcc only): its top_k best and its sum of exponentials, each logit read once.
//
// Contract: keys (logit, id) unique and descending, ties to the lower id, only finite logits; the same whatever the threads'
// order. A chunk is one or a few tiles in turn; a thread holds its part of a tile in registers.
#pragma once
#include <float.h>

#include "draft_pack.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

constexpr int kStagedThreads = 128;      // threads with values that reach the bound: 9 a tile on average for top_k 8
constexpr int kListCapacity = 1024;      // those values
constexpr float kMostAboveBase = 64.0f;  // exponentials stay below e^64 of where their sum is based

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
  const int log2_lanes = n <= kDraftThreads / 8 ? 3 : 0, lanes = 1 << log2_lanes;
  const int lane = threadIdx.x & 31, own = lane & (lanes - 1);
#pragma unroll 1
  for (int base = (static_cast<int>(threadIdx.x) - lane) >> log2_lanes; base < n; base += kDraftThreads >> log2_lanes) {
    const int at = base + (lane >> log2_lanes);
    const uint64_t key = list[min(at, n - 1)];
    const int rank = count_by_lanes(list, n, key, own, lanes, [&](uint64_t other) { return other > key; });
    if (own == 0 && at < n && rank < top_k) keys[rank] = key;
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
  float limit = -INFINITY, origin = 0.0f;       // what follows from the base
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
        origin = exp_base(base);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i % 4] += fast_exp(Pack<T>::get(part.packs[load], i) - origin);
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

}  // namespace flashtrie
#endif
