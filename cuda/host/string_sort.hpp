// Sorts strings by their bytes, eight at a time.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace flashtrie {

// Ascending, each once.
void sort_unique(std::vector<std::string_view>& strings);

// Ascending by key, least significant digit first; `digits` bytes of the key count, from the lowest.
// `other` is scratch of the same length. T has a member `uint64_t key`.
template <typename T>
void radix_sort(T* values, T* other, uint64_t count, int first_digit, int last_digit) {
  T* from = values;
  T* to = other;
  for (int digit = first_digit; digit < last_digit; ++digit) {
    uint32_t begins[257] = {};
    const int shift = 8 * digit;
    for (uint64_t i = 0; i < count; ++i) ++begins[((from[i].key >> shift) & 255) + 1];
    bool is_moot = false;  // one value throughout
    for (int b = 0; b < 256 && !is_moot; ++b) is_moot = begins[b + 1] == count;
    if (is_moot) continue;
    for (int b = 0; b < 256; ++b) begins[b + 1] += begins[b];
    for (uint64_t i = 0; i < count; ++i) to[begins[(from[i].key >> shift) & 255]++] = from[i];
    T* const swapped = from;
    from = to;
    to = swapped;
  }
  if (from != values)
    for (uint64_t i = 0; i < count; ++i) values[i] = from[i];
}

}  // namespace flashtrie
