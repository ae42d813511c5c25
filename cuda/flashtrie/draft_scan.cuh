// One chunk of a row of logits by a whole block (nvcc only): its top_k best and its sum of exponentials, each logit read once.
//
// Contract: keys (logit, id) unique and descending, ties to the lower id, only finite logits; the same whatever the threads'
// order. A chunk is one or a few tiles in turn; a thread holds its part of a tile in registers.
#pragma once
#include <float.h>

#include "draft_mail.cuh"
#include "draft_pack.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

constexpr int kStagedLanes = 2;          // lanes of a warp that are looked through together
constexpr int kListCapacity = 1024;      // values that reach the bound: 9 a tile on average for top_k 8
constexpr float kMostAboveBase = 64.0f;  // exponentials stay below e^64 of where their sum is based

// What a thread holds of a tile: its packs, in ascending order of ids; those that a tile has no place for hold anything.
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
  if (begin == 0 && end == tile_packs && tile_packs % kDraftThreads == 0) {  // as nearly all tiles are cut
    const uint4* packs = reinterpret_cast<const uint4*>(row + part.first_id);
#pragma unroll
    for (int load = 0; load < kLoads; ++load)
      if (load * kDraftThreads < tile_packs) part.packs[load] = __ldcs(packs + load * kDraftThreads);
    return part;
  }
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
  alignas(16) uint4 staged[kDraftWarps][kStagedLanes][kThreadLogits / 4];  // of a 16-bit type half is used
  alignas(16) uint64_t list[kListCapacity];
  int staged_ids[kDraftWarps][kStagedLanes];
  alignas(16) uint32_t peaks[32];
  alignas(16) float bases[kDraftWarps];
  float sums[kDraftWarps][32];
  uint32_t warp_totals[kDraftWarps];
  uint32_t num_listed;
  float bound;
  int is_finisher;
};

static_assert(sizeof(ScanShared) == 11536, "SCAN_BYTES of cuda_draft_layout.py");

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
      for (int load = 0; load < kLoads && load * kDraftThreads < chunk.tile_packs; ++load)
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
    for (int load = 0; load < kLoads && load * kDraftThreads < chunk.tile_packs; ++load)
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
    for (int load = 0; load * kDraftThreads < chunk.tile_packs && next < static_cast<uint32_t>(top_k); ++load) {
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

// The whole block, from each thread's largest value of a tile: what at least top_k values of the tile reach, the top_k-th
// largest of those of groups of eight threads. One warp finds it, since a multiprocessor is busy with many.
__device__ __forceinline__ float tile_bound(ScanShared& shared, float peak, int top_k, int warp, int lane) {
  uint32_t group_peak = ordered_score(peak);
#pragma unroll
  for (int step = 1; step < 8; step <<= 1) group_peak = max(group_peak, __shfl_xor_sync(kWholeWarp, group_peak, step));
  if (lane % 8 == 0) shared.peaks[threadIdx.x / 8] = group_peak;
  __syncthreads();
  if (warp == 0) {
    const uint32_t mine = shared.peaks[lane];
    int greater[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 32; ++i) greater[i % 4] += shared.peaks[i] > mine ? 1 : 0;
    const bool reaches = greater[0] + greater[1] + (greater[2] + greater[3]) < top_k;
    const uint32_t bound = warp_min(reaches ? mine : ~0u);
    if (lane == 0) shared.bound = fmaxf(score_of(bound), -FLT_MAX);
  }
  __syncthreads();
  return shared.bound;
}

static_assert(kDraftThreads / 8 == 32, "a group of eight threads for each lane of a warp");

// One warp: values of its lanes that reach the bound, into the block's list; `peak` is each lane's largest. The few lanes with
// such values stage what they hold, and then all lanes look through it together.
template <typename T>
__device__ __forceinline__ void list_warp(ScanShared& shared, const TilePart<T>& part, float peak, float lowest, int num_loads,
                                          int warp, int lane) {
  constexpr int kCount = Pack<T>::kCount, kLoads = Pack<T>::kLoads;
  bool is_hot = peak >= lowest;
  uint32_t hot = __ballot_sync(kWholeWarp, is_hot);
  const int id_step = lane / kCount * (kDraftThreads * kCount) + lane % kCount;
#pragma unroll 1
  while (hot != 0) {
    const int order = __popc(hot & lanes_below(lane)), num_staged = __popc(hot);
    if (is_hot && order < kStagedLanes) {
#pragma unroll
      for (int load = 0; load < kLoads; ++load) shared.staged[warp][order][load] = part.packs[load];
      shared.staged_ids[warp][order] = part.first_id;
      is_hot = false;
    }
    __syncwarp();
    float values[kStagedLanes];
#pragma unroll
    for (int i = 0; i < kStagedLanes; ++i) {
      const bool is_value = i < num_staged && lane < num_loads * kCount;
      values[i] = is_value ? widen(reinterpret_cast<const T*>(shared.staged[warp][i])[lane]) : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kStagedLanes; ++i) {
      if (!(values[i] >= lowest)) continue;
      const uint32_t place = atomicInc(&shared.num_listed, 1u << 30);  // an addition would first see who else adds
      if (place < kListCapacity) shared.list[place] = rank_key(values[i], shared.staged_ids[warp][i] + id_step);
    }
    __syncwarp();
    hot = __ballot_sync(kWholeWarp, is_hot);
  }
}

// The block writes the top_k best of n keys, descending, then kNothing; a group of lanes finds each key's rank.
__device__ __forceinline__ void write_best(const uint64_t* list, int n, int top_k, uint64_t* keys) {
  const int log2_lanes = n <= kDraftThreads / 8 ? 3 : 0, lanes = 1 << log2_lanes;
  const int lane = threadIdx.x & 31, own = lane & (lanes - 1);
#pragma unroll 1
  for (int base = (static_cast<int>(threadIdx.x) - lane) >> log2_lanes; base < n; base += kDraftThreads >> log2_lanes) {
    const int at = base + (lane >> log2_lanes);
    const uint64_t key = list[min(at, n - 1)];
    const int rank = count_by_lanes(list, n, key, own, lanes, [&](uint64_t other) { return other > key; });
    if (own == 0 && at < n && rank < top_k) send(keys + rank, key);
  }
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= min(n, top_k) && rank < chunk_keys(top_k)) send(keys + rank, kNothing);
}

// One warp: the block's sum from those of all its threads.
__device__ __forceinline__ ExpSum join_threads(const ScanShared& shared, int lane) {
  float base = shared.bases[0], sum = 0.0f;
#pragma unroll
  for (int warp = 1; warp < kDraftWarps; ++warp) base = fmaxf(base, shared.bases[warp]);
  const float origin = exp_base(base);
#pragma unroll
  for (int warp = 0; warp < kDraftWarps; ++warp) sum += shared.sums[warp][lane] * fast_exp(shared.bases[warp] - origin);
  return {base, warp_sum(sum)};
}

// A thread's sum of exponentials, based on the largest of its warp's first logits, or of later ones if they are much larger.
struct WarpSum {
  float base = -INFINITY, total = 0.0f;

  // The whole warp. Returns the thread's largest logit of the tile.
  template <typename T>
  __device__ __forceinline__ float add(const TilePart<T>& part, int tile_packs) {
    constexpr int kCount = Pack<T>::kCount, kLoads = Pack<T>::kLoads;
    float peak = Pack<T>::peak(part.packs[0]);
    if (base == -INFINITY) base = warp_peak(peak);
#pragma unroll 1
    while (true) {
      const float origin = exp_base(base);
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        if (load * kDraftThreads >= tile_packs) break;
        peak = fmaxf(peak, Pack<T>::peak(part.packs[load]));
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i % 4] += fast_exp(Pack<T>::get(part.packs[load], i) - origin);
      }
      if (!__any_sync(kWholeWarp, peak > base + kMostAboveBase)) {
        total += (sums[0] + sums[1]) + (sums[2] + sums[3]);
        return peak;
      }
      const float new_base = fmaxf(base, warp_peak(peak));
      total *= fast_exp(base - new_base);
      base = new_base;
    }
  }

 private:
  __device__ static float warp_peak(float peak) { return score_of(warp_max(ordered_score(fmaxf(peak, -INFINITY)))); }
};

// Where a chunk's words go.
struct ChunkPlace {
  uint64_t* keys;  // [chunk_keys(top_k)], or null: they are not wanted
  uint64_t* sum;
};

// One block: top_k keys and the sum of exponentials of one chunk, sent to where `place` says. A tile's exponentials are summed
// while its loads arrive; then the values that reach the bound are listed. The bound comes from the first tile with enough
// logits above -inf. Returns whether `ticket`, thread 0's, is `last`.
template <typename T, typename Place>
__device__ __forceinline__ bool scan_chunk(const T* row, int vocab_size, Chunk chunk, ScanShared& shared, int top_k,
                                           const Place& place, uint32_t ticket, uint32_t last) {
  const int lane = threadIdx.x & 31;
  if (threadIdx.x == 0) shared.num_listed = 0;
  WarpSum sum;
  float lowest = -INFINITY;  // the bound, once there is one
#pragma unroll 1
  for (int tile = chunk.first; tile < chunk.last; ++tile) {
    const TilePart<T> part = load_tile(row, vocab_size, tile, chunk.tile_packs);
    const int warp = warp_index();
    const float peak = sum.add(part, chunk.tile_packs);
    if (!(lowest > -FLT_MAX)) lowest = tile_bound(shared, peak, top_k, warp, lane);  // alike in all threads
    list_warp(shared, part, peak, lowest, (chunk.tile_packs + kDraftThreads - 1) / kDraftThreads, warp, lane);
  }
  const int warp = warp_index();
  shared.sums[warp][lane] = sum.total;
  if (lane == 0) shared.bases[warp] = sum.base;
  if (threadIdx.x == 0) shared.is_finisher = ticket == last;
  __syncthreads();
  const ChunkPlace to = place();
  if (to.keys) {
    if (shared.num_listed > kListCapacity) list_exactly(row, vocab_size, chunk, shared, top_k);
    write_best(shared.list, static_cast<int>(shared.num_listed), top_k, to.keys);
  }
  if (warp == kDraftWarps - 1) {
    const ExpSum joined = join_threads(shared, lane);
    if (lane == 0) send(to.sum, sum_word(joined));
  }
  return shared.is_finisher != 0;
}

}  // namespace flashtrie
#endif
