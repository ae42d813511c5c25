// The search kernels: one persistent launch answers a whole batch. See cuda/README.md for what each reads. Those for heavy
// fan-outs are in search_pairs.cu.
#include "flashtrie/pack_hits.cuh"
#include "flashtrie/search_launch.cuh"

using namespace flashtrie;

// One block a query, two blocks a multiprocessor: throughput.
extern "C" __global__ void __launch_bounds__(kSmallBlock, 2) search_block(const __grid_constant__ SearchBatch batch) {
  GroupSearch<1, kSmallBlock / 32, kShared>(batch, shared_memory).run();
}

// One block a query, a multiprocessor to itself: latency of small beams, throughput of large ones.
extern "C" __global__ void __launch_bounds__(kLargeBlock, 1) search_alone(const __grid_constant__ SearchBatch batch) {
  GroupSearch<1, kLargeBlock / 32, kShared>(batch, shared_memory).run();
}

// One block a query, frontier and pools in global memory: very large beams, or little shared memory.
extern "C" __global__ void __launch_bounds__(kSmallBlock, 1) search_spill(const __grid_constant__ SearchBatch batch) {
  GroupSearch<1, kSmallBlock / 32, kSpills>(batch, shared_memory).run();
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A cluster of blocks a query: latency of large beams.
extern "C" __global__ void __launch_bounds__(kLargeBlock, 1) __cluster_dims__(4)
    search_cluster4(const __grid_constant__ SearchBatch batch) {
  GroupSearch<4, kLargeBlock / 32, kShared>(batch, shared_memory).run();
}

extern "C" __global__ void __launch_bounds__(kLargeBlock, 1) __cluster_dims__(8)
    search_cluster8(const __grid_constant__ SearchBatch batch) {
  GroupSearch<8, kLargeBlock / 32, kShared>(batch, shared_memory).run();
}
#endif

extern "C" __global__ void build_root_table(TrieView trie, uint32_t root_last, int shift, uint32_t num_places,
                                            uint32_t* table) {
  const uint32_t place = blockIdx.x * blockDim.x + threadIdx.x;
  if (place <= num_places) table[place] = root_table_entry(trie, root_last, shift, place);
}

// The arrays of node_tags.cuh, a thread a node.
extern "C" __global__ void __launch_bounds__(256) tag_nodes(TrieView trie, uint32_t* tags, LineHead* heads) {
  const uint64_t node = blockIdx.x * 256ull + threadIdx.x;
  if (node >= trie.num_nodes) return;
  tags[node] = make_tag(trie, static_cast<uint32_t>(node));
  if (node % kLineNodes == 0) heads[node / kLineNodes] = make_head(trie, static_cast<uint32_t>(node / kLineNodes));
}

// Whose children go into the table: the wide nodes among 32, a warp each.
template <typename Take>
__device__ void for_wide_nodes(const TrieView& trie, uint32_t fan_out, const Take& take) {
  const uint64_t node = blockIdx.x * 256ull + threadIdx.x;
  const ChildRange mine = node < trie.num_nodes ? child_range(trie, static_cast<uint32_t>(node)) : ChildRange{0, 0};
  for (uint32_t votes = simt::ballot(mine.fan_out() >= fan_out); votes != 0; votes &= votes - 1) {
    const uint32_t from = simt::lowest_one(votes);
    take(ChildRange{simt::shuffle(mine.first, from), simt::shuffle(mine.last, from)});
  }
}

extern "C" __global__ void __launch_bounds__(256) count_children(TrieView trie, uint32_t fan_out, uint32_t* count) {
  for_wide_nodes(trie, fan_out, [&](ChildRange range) {
    if (simt::lane() == 0) simt::atomic_add(count, range.fan_out());
  });
}

// Fills the table of child_table.cuh, whose places are all 0.
extern "C" __global__ void __launch_bounds__(256) put_in_table(TrieView trie, ChildTable table, uint32_t* places) {
  for_wide_nodes(trie, table.fan_out, [&](ChildRange range) { put_children(trie, table, places, range, simt::lane(), 32); });
}

extern "C" __global__ void __launch_bounds__(kSmallBlock) pack_hits(const __grid_constant__ SearchBatch batch,
                                                                const __grid_constant__ PackedHits to) {
  pack_query(batch, to, shared_memory);
}
