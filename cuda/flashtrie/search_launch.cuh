// Part of kernels/search.cu and kernels/search_pairs.cu: what they are launched with; the Python twin is KERNELS in
// flashtrie_cli/engine/cuda_layout.py.
#pragma once
#include "search_group.cuh"

namespace flashtrie {
namespace {

extern __shared__ __align__(16) unsigned char shared_memory[];

constexpr int kSmallBlock = 512, kLargeBlock = 640;  // threads

}  // namespace
}  // namespace flashtrie
