// Which labels of a child range are in the bitmap: the inner loop of the search, with SIMD where there is some.
#pragma once
#include <cstdint>

namespace flashtrie {

// Writes `first + i` for every i in [0, count) whose labels[i] is in the bitmap, ascending; returns how many.
// `hits` must have room for count + kScanSlack. Reads nothing outside labels[0, count) and the bitmap.
using ScanLabels = uint64_t (*)(const uint16_t* labels, uint64_t count, const uint32_t* bitmap, uint32_t first,
                                uint32_t* hits);
constexpr uint64_t kScanSlack = 16;

uint64_t scan_labels_portable(const uint16_t* labels, uint64_t count, const uint32_t* bitmap, uint32_t first,
                              uint32_t* hits);
// The fastest that this processor runs, found once.
ScanLabels scan_labels();

}  // namespace flashtrie
