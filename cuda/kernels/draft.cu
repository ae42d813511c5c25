// Draft trees in one launch.
//
// A row of logits is cut into equal tiles of at most 8,192; a chunk is one or a few tiles in turn. Every block reads one
// chunk once, 16 bytes a load and a tile's loads all in flight together, and leaves the chunk's top_k values and its sum
// of exponentials in the workspace. The block that comes last for a batch row merges the chunks of its rows, a warp each
// and only of the depths that the tree reaches, grows the tree level by level and writes all outputs.
//
// Reads a batch row: (block - 1) V logits once; from L2 the workspace, 8 top_k + 8 bytes a chunk.
#include "../flashtrie/draft_pick.cuh"
#include "../flashtrie/draft_scan.cuh"

namespace flashtrie {

constexpr int kBlocksAtOnce = 4;  // of a multiprocessor: 64 registers a thread hold a tile without spilling
constexpr int kFewLevels = 5;     // that are added in less time than nodes are picked
static_assert(kFewLevels < kDraftWarps, "growing sees the rows that are merged first");

// A warp's list of a row's best: kept keys and new ones, and room to sort the kept ones into. It lies where growing has its
// list later.
constexpr int kRowCapacity = 192;
constexpr int kRowStride = kRowCapacity + kDraftMaxTopK;
static_assert(8 * kDraftWarps * kRowStride <= 16 * kMostListed, "list, costs and origins of GrowShared");
static_assert(4 * kDraftMaxNodes * kDraftMaxNodes / 32 <= 8 * kMostListed, "the masks lie there at last");

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

// One warp: all chunks of one row of logits, a lane each at a time. Their best top_k keys and some more, at most
// kRowCapacity, into `list`; returns how many, and the row's sum.
__device__ __forceinline__ int merge_chunks(const uint64_t* keys, const ExpSum* sums, int num_chunks, int top_k,
                                            uint64_t* list, int lane, ExpSum& joined) {
  constexpr int kStep = 4;  // ranks of a chunk loaded together; deeper ones are hardly ever needed
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
    bound = max(bound, group_bound(static_cast<uint32_t>(found[0] >> 32), top_k));
#pragma unroll 1
    for (int rank = kStep;; rank += kStep) {
      if (listed > kRowCapacity - 32 * kStep) {
        __syncwarp();
        listed = keep_best(list, list + kRowCapacity, listed, top_k, lane);
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

// One warp: the candidates of one row of logits, into shared memory.
__device__ __forceinline__ void merge_row(const uint64_t* keys, const ExpSum* sums, int num_chunks, int top_k, uint64_t* list,
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
    const int rank = count_by_lanes(list, listed, key, lane & (lanes - 1), lanes,
                                    [&](uint64_t other) { return other > key; });
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
        shared_(*reinterpret_cast<GrowShared*>(memory)),
        growth_(shared_, params.sizes, params.list_capacity) {
    lists_.stride = power_of_two_at_least(params.sizes.top_k + 2);
    lists_.costs = reinterpret_cast<float*>(memory + (sizeof(GrowShared) + 15) / 16 * 16);
    lists_.ids = reinterpret_cast<uint32_t*>(lists_.costs + (depths_ + 2) * lists_.stride);
  }

  __device__ void run() {
    if (threadIdx.x == 0) {
      copy_later(&tree_.root, params_.roots + batch_);
      copy_later(&tree_.base_length, params_.base_lengths + batch_);
    }
    // The rows of the first depths, and the others if the tree may get there.
    bool is_deep = false;
#pragma unroll 1
    for (int first = 0; first < depths_ && (first == 0 || is_deep); first += kDraftWarps) {
      merge_rows(first);
      if (first == 0) clear_ends();
      __syncthreads();
      if (first == 0) is_deep = goes_deep();
    }
    if (is_deep)
      pick();
    else if (depths_ > 0)
      grow();
    copies_are_there();
    __syncthreads();
    write();
  }

 private:
  // Level by level.
  __device__ void grow() {
    growth_.add_children(lists_.costs);
#pragma unroll 1
    for (int depth = 1; depth < min(depths_, kDraftWarps) && growth_.add_level(lists_, depth); ++depth) {
    }
  }

  // Node by node.
  __device__ void pick() {
    if (threadIdx.x < 32) {
      const int num_nodes = params_.sizes.num_nodes;
      if (num_nodes <= 32)
        tree_.size = pick_nodes<1>(lists_, shared_, num_nodes);
      else if (num_nodes <= 64)
        tree_.size = pick_nodes<2>(lists_, shared_, num_nodes);
      else if (num_nodes <= 128)
        tree_.size = pick_nodes<4>(lists_, shared_, num_nodes);
      else
        tree_.size = pick_nodes<8>(lists_, shared_, num_nodes);
    }
    __syncthreads();
    growth_.take(tree_.size);
  }

  // Whether the tree may well be deeper than kFewLevels. It is not if all nodes of its first few levels come before the first
  // one so deep, and are enough. The same in all threads.
  __device__ bool goes_deep() const {
    const int top_k = params_.sizes.top_k, stride = lists_.stride;
    if (depths_ <= kFewLevels) return false;
    float deep = lists_.costs[0];
#pragma unroll
    for (int depth = 1; depth <= kFewLevels; ++depth) deep += lists_.costs[depth * stride];
    if (!(deep < INFINITY)) return false;  // there is none
    float worst = lists_.costs[top_k - 1];
    int count = 1 + top_k, level = top_k;
#pragma unroll 1
    for (int depth = 1; count < params_.sizes.num_nodes && depth < kFewLevels; ++depth) {
      worst += lists_.costs[depth * stride + top_k - 1];
      count += level *= top_k;
    }
    return count < params_.sizes.num_nodes || !(worst <= deep);
  }

  // The root's key, and what lies behind the lists' rows and behind the last of them.
  __device__ void clear_ends() {
    if (threadIdx.x == 0) shared_.keys[0] = shared_.places[0] = 0;
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
              shared_.list + warp * kRowStride, lists_.costs + depth * lists_.stride, lists_.ids + depth * lists_.stride);
  }

  __device__ void write() {
    const DraftSizes& sizes = params_.sizes;
    const int valid = growth_.size();
    uint32_t bad_row = 0;
    if (threadIdx.x == 0 && depths_ > 0) bad_row = __ldcg(params_.bad_rows + batch_);
    const int log2_stride = 31 - __clz(lists_.stride);
    uint32_t* masks = reinterpret_cast<uint32_t*>(shared_.list);
    collect_masks(sizes, valid, masks, [&](uint32_t node) { return growth_.parent(node); });
    bool is_full = false;  // with its parent's last candidate in the tree, all the others are
    write_nodes(sizes, params_.out, batch_, tree_.root, tree_.base_length, valid, [&](int i) {
      const int place = static_cast<int>(growth_.place(i)), depth = place >> log2_stride;
      is_full |= (place & (lists_.stride - 1)) == sizes.top_k - 1;
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
  GrowShared& shared_;
  TreeGrowth growth_;
  DraftLists lists_;
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
