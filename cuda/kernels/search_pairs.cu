// The search kernels for tries with heavy fan-outs: frontiers are expanded by pairs, best ones first. Kernels of their own,
// since what they can do more costs all steps registers and instructions.
#include "flashtrie/search_launch.cuh"

using namespace flashtrie;

// One block a query, two blocks a multiprocessor.
extern "C" __global__ void __launch_bounds__(kSmallBlock, 2) pairs_block(const __grid_constant__ SearchBatch batch) {
  GroupSearch<1, kSmallBlock / 32, kPairs>(batch, shared_memory).run();
}

// One block a query, a multiprocessor to itself.
extern "C" __global__ void __launch_bounds__(kLargeBlock, 1) pairs_alone(const __grid_constant__ SearchBatch batch) {
  GroupSearch<1, kLargeBlock / 32, kPairs>(batch, shared_memory).run();
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A cluster of blocks a query.
extern "C" __global__ void __launch_bounds__(kLargeBlock, 1) __cluster_dims__(8)
    pairs_cluster8(const __grid_constant__ SearchBatch batch) {
  GroupSearch<8, kLargeBlock / 32, kPairs>(batch, shared_memory).run();
}
#endif
