// Draft trees in one launch.
//
// A row of logits is cut into equal tiles of at most 8,192; a chunk is one or a few tiles in turn. Every block reads one
// chunk once, 16 bytes a load and a tile's loads all in flight together, and sends the chunk's top_k values and its sum of
// exponentials through the workspace. The block that began last for a batch row, which is one more than there are chunks if
// all run at once, merges the chunks of its rows, two rows a warp, grows the tree level by level, or node by node if it is small
// and deep, and writes all outputs.
//
// Reads a batch row: (block - 1) V logits once; from L2 the workspace, 8 (chunk_keys(top_k) + 1) bytes a chunk, twice at least.
#include "../flashtrie/draft_pick.cuh"
#include "../flashtrie/draft_scan.cuh"

namespace flashtrie {

constexpr int kBlocksAtOnce = 3;  // of a multiprocessor: 80 registers a thread, for what a finisher has in flight

struct DraftParams {
  DraftSizes sizes;
  DraftOutputs out;
  const char* rows;      // the logits of depth 1 of the first batch row
  int64_t row_bytes;
  int64_t block_bytes;   // from one batch row to the next
  const int32_t* roots;
  const int32_t* base_lengths;
  const int32_t* vocab_map;
  uint64_t* chunk_keys;  // [B, depths, chunks, chunk_keys(top_k)] (logit, id), descending; zero before and after
  uint64_t* chunk_sums;  // [B, depths, chunks] words of ExpSum, zero before and after
  uint32_t* tickets;     // [B], zero before and after
  int32_t num_chunks;    // of a row
  int32_t num_tiles;     // of a row
  int32_t tile_packs;    // 16-byte packs of a tile; the last tile of a row may have fewer
  int32_t chunk_tiles;   // of a chunk; the last one of a row may have fewer
  int32_t sums_only;     // leave the chunks' sums in the workspace, and no tree
};

// Rows are merged beside what is left of a scan; a tree comes after it.
struct alignas(16) FinishShared {
  union {
    ScanShared scan;
    TreeShared tree;
  };
  ChildNumbers numbers;
};

static_assert(sizeof(FinishShared) == 30960, "FINISH_BYTES of cuda_draft_layout.py");

// The finisher of a batch row: chunks to candidate lists, lists to a tree, tree to outputs.
template <bool kIsWide>
class Finish {
 public:
  __device__ Finish(const DraftParams& params, int64_t batch, unsigned char* memory)
      : params_(params),
        sizes_(params.sizes),
        batch_(batch),
        depths_(params.sizes.num_depths()),
        shared_(*reinterpret_cast<FinishShared*>(memory)) {
    lists_.top_k = sizes_.top_k;
    lists_.stride = power_of_two_at_least(sizes_.top_k + 2);
    lists_.costs = reinterpret_cast<float*>(memory + sizeof(FinishShared));
    lists_.ids = reinterpret_cast<uint32_t*>(lists_.costs + (depths_ + 2) * lists_.stride);
  }

  __device__ void run() {
    const int32_t root = params_.roots[batch_], base_length = params_.base_lengths[batch_];
    TreeLevels levels(lists_, shared_.numbers, shared_.tree, sizes_.num_nodes);
    clear_ends();
    number_children(shared_.numbers, sizes_.num_nodes, sizes_.top_k);
    touch(params_.out);
    const ChunkMail mail{keys(), sums(), depths_, params_.num_chunks, sizes_.top_k};
    const bool is_bad = __syncthreads_or(merge_rows<kIsWide>(mail, lists_));
    write(grow(levels), root, base_length, is_bad);
  }

 private:
  __device__ uint64_t* keys() const {
    return params_.chunk_keys + batch_ * depths_ * params_.num_chunks * chunk_keys(sizes_.top_k);
  }
  __device__ uint64_t* sums() const { return params_.chunk_sums + batch_ * depths_ * params_.num_chunks; }

  // What lies behind the lists' rows and behind the last of them.
  __device__ void clear_ends() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int depth = warp; depth < depths_ + 2; depth += kDraftWarps)
#pragma unroll 1
      for (int rank = lane + (depth < depths_ ? sizes_.top_k : 0); rank < lists_.stride; rank += 32)
        lists_.costs[depth * lists_.stride + rank] = __uint_as_float(kNoCost);
  }

  __device__ Tree grow(TreeLevels& levels) {
    TreeShared& shared = shared_.tree;
    const Tree tree = levels.grow(depths_);
    if (tree.size > 0) return tree;
    if (warp_index() == 0)
      shared.size = sizes_.num_nodes <= 32 ? TreePick<1>(lists_, shared, sizes_.num_nodes).run()
                                           : TreePick<2>(lists_, shared, sizes_.num_nodes).run();
    __syncthreads();
    return {shared.nodes[0], shared.size};
  }

  __device__ void write(const Tree& tree, int32_t root, int32_t base_length, bool is_bad) {
    const int log2_stride = 31 - __clz(lists_.stride);
    write_nodes(sizes_, params_.out, batch_, root, base_length, tree.size, [&](int i) {
      const TreeNode node = tree.nodes[i];
      int32_t token = static_cast<int32_t>(lists_.ids[node.place]);
      if (params_.vocab_map) token = params_.vocab_map[token];
      return DraftNode{token, static_cast<int32_t>(node.place >> log2_stride) + 1, static_cast<int32_t>(node.parent),
                       node.cost, kNoNode};
    });
    // Nodes are written by the first warps, if they are few; so the others follow their parents.
    const int i = thread_after(kDraftWarps / 2);
    if (i < sizes_.num_nodes) find_mask(tree, i);
    const bool has_all = i > 0 && i < tree.size && (tree.nodes[i].place & (lists_.stride - 1)) == sizes_.top_k - 1u;
    const bool is_full = __syncthreads_or(has_all);  // some node has all its listed children in the tree
    write_masks(sizes_, params_.out, batch_, [&](int node, int word) { return shared_.tree.masks[node][word]; });
    if (threadIdx.x == 0) {
      const bool is_truncated = is_full && sizes_.vocab_size > sizes_.top_k;
      params_.out.status[batch_] = (is_bad ? kDraftBadRow : 0) | (is_truncated ? kDraftTruncated : 0);
    }
  }

  // The ancestors of a node, itself and the root included; padding has none, or itself.
  __device__ void find_mask(const Tree& tree, int node) {
    const bool is_node = node < tree.size;
    uint32_t at = node;
#pragma unroll 1
    for (int word = sizes_.mask_words() - 1; word >= 0; --word) {
      uint32_t bits = is_node ? 0 : padding_mask(sizes_, node, word);
#pragma unroll 1
      for (; is_node && at >> 5 == static_cast<uint32_t>(word); at = at == 0 ? kNoNode : tree.nodes[at].parent)
        bits |= 1u << (at & 31);
      shared_.tree.masks[node][word] = bits;
    }
  }

  const DraftParams& params_;
  const DraftSizes& sizes_;
  const int64_t batch_;
  const int depths_;
  FinishShared& shared_;
  DraftLists lists_;
};

template <typename T, bool kIsWide>
__device__ __forceinline__ void build(const DraftParams& params, unsigned char* memory) {
  const DraftSizes& sizes = params.sizes;
  const uint32_t chunks = params.num_chunks, depths = sizes.num_depths();  // grid: chunks, depths and perhaps a spare one, batch rows
  const int64_t batch = blockIdx.z;
  const uint32_t num_tickets = chunks * depths + (gridDim.y > depths ? 1 : 0);
  if (depths > 0 && blockIdx.y == depths) {  // a tree of one node has nothing to scan
    if (params.sums_only || blockIdx.x > 0) return;
    if (!__syncthreads_or(threadIdx.x == 0 && comes_last(params.tickets + batch, num_tickets))) return;
  } else if (depths > 0) {
    uint32_t ticket = 0;
    if (threadIdx.x == 0 && !params.sums_only) ticket = take_ticket(params.tickets + batch, num_tickets);
    const uint32_t depth = blockIdx.y, chunk = blockIdx.x;
    const T* row = reinterpret_cast<const T*>(params.rows + batch * params.block_bytes + depth * params.row_bytes);
    const int first_tile = static_cast<int>(chunk) * params.chunk_tiles;
    const Chunk tiles{first_tile, min(first_tile + params.chunk_tiles, params.num_tiles), params.tile_packs};
    const auto place = [&]() -> ChunkPlace {
      const int64_t at = (batch * depths + depth) * chunks + chunk;
      return {params.sums_only ? nullptr : params.chunk_keys + at * chunk_keys(sizes.top_k), params.chunk_sums + at};
    };
    const bool is_finisher = scan_chunk(row, sizes.vocab_size, tiles, *reinterpret_cast<ScanShared*>(memory), sizes.top_k,
                                        place, ticket, num_tickets - 1);
    if (params.sums_only || !is_finisher) return;
  }
  Finish<kIsWide>(params, batch, memory).run();
}

}  // namespace flashtrie

#if defined(__CUDACC__)
extern __shared__ __align__(16) unsigned char shared_memory[];

// The block's shared memory by an address in a register, which else is worked out again wherever it is used.
__device__ __forceinline__ unsigned char* block_memory() {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  asm volatile("" : "+r"(address));
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

#define FT_DRAFT_KERNEL(name, T, is_wide)                                                             \
  extern "C" __global__ void __launch_bounds__(flashtrie::kDraftThreads, flashtrie::kBlocksAtOnce)    \
      name(const __grid_constant__ flashtrie::DraftParams params) {                                   \
    flashtrie::build<T, is_wide>(params, block_memory());                                             \
  }

FT_DRAFT_KERNEL(draft_float32, float, false)
FT_DRAFT_KERNEL(draft_float16, __half, false)
FT_DRAFT_KERNEL(draft_bfloat16, flashtrie::Bfloat16, false)
FT_DRAFT_KERNEL(draft_float32_wide, float, true)
FT_DRAFT_KERNEL(draft_float16_wide, __half, true)
FT_DRAFT_KERNEL(draft_bfloat16_wide, flashtrie::Bfloat16, true)
#endif
