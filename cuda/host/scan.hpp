// Which labels of a child range are in the bitmap: the inner loop of the search, with SIMD where there is some.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace flashtrie {

// A coarse picture of a bitmap, small enough for two registers: a label that is in the bitmap is in the sieve.
struct Sieve {
  static constexpr uint32_t kWords = 64, kBits = 16 * kWords;
  alignas(64) uint16_t words[kWords];

  void clear() { std::fill_n(words, kWords, uint16_t(0)); }
  void add(uint32_t label) { words[label % kWords] |= static_cast<uint16_t>(1u << (label / kWords % 16)); }
};

// Writes `first + i` for every i in [0, count) whose labels[i] is in the bitmap, ascending; returns how many.
// `hits` must have room for count + kScanSlack. Reads nothing outside labels[0, count), the bitmap and the sieve.
using ScanLabels = uint64_t (*)(const uint16_t* labels, uint64_t count, const uint32_t* bitmap, const Sieve& sieve,
                                uint32_t first, uint32_t* hits);
constexpr uint64_t kScanSlack = 32;

uint64_t scan_labels_portable(const uint16_t* labels, uint64_t count, const uint32_t* bitmap, const Sieve& sieve,
                              uint32_t first, uint32_t* hits);
// All that this processor runs, by name; tests compare them.
struct NamedScan {
  const char* name;
  ScanLabels scan;
};
std::vector<NamedScan> all_scans();

// The fastest that this processor runs, found once.
struct Scans {
  ScanLabels plain;   // asks the bitmap of every label
  ScanLabels sieved;  // asks it of those that pass the sieve, where that is faster when few labels do
};
Scans fastest_scans();

}  // namespace flashtrie
