// Token masks with an entry for every allowed token, as the kernels read them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "flashtrie/masks.cuh"

namespace flashtrie {

// The arrays of a MaskView in which no node is single.
struct PlainMasks {
  std::vector<uint16_t> rows;  // num_nodes + 2 rows
  std::vector<uint32_t> entries;
  std::vector<uint32_t> far_entries;
  std::vector<uint32_t> far_targets;
};

// Allowed (node, token) pairs, end-of-sequence ids aside: how many entries that makes.
uint64_t count_allowed_pairs(const MaskView& masks);

// False where the entries would be more than rows can number.
bool make_plain(const MaskView& masks, PlainMasks& made);

}  // namespace flashtrie
