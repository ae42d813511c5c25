// Strict UTF-8 and the white space of Unicode, as Python's bytes.decode() and str.split() see them.
#pragma once
#include <stdint.h>

namespace flashtrie {

// Bytes of the well-formed sequence at `at` (Unicode 15, table 3-7), 0 where there is none.
inline int decode_utf8(const unsigned char* at, const unsigned char* end, uint32_t& code_point) {
  const uint32_t lead = at[0];
  if (lead < 0x80) {
    code_point = lead;
    return 1;
  }
  auto follows = [&](int i, uint32_t low = 0x80, uint32_t high = 0xbf) {
    return at + i < end && at[i] >= low && at[i] <= high;
  };
  if (lead >= 0xc2 && lead <= 0xdf) {
    if (!follows(1)) return 0;
    code_point = (lead & 0x1f) << 6 | (at[1] & 0x3fu);
    return 2;
  }
  if (lead >= 0xe0 && lead <= 0xef) {
    if (!follows(1, lead == 0xe0 ? 0xa0 : 0x80, lead == 0xed ? 0x9f : 0xbf) || !follows(2)) return 0;
    code_point = (lead & 0x0f) << 12 | (at[1] & 0x3fu) << 6 | (at[2] & 0x3fu);
    return 3;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    if (!follows(1, lead == 0xf0 ? 0x90 : 0x80, lead == 0xf4 ? 0x8f : 0xbf) || !follows(2) || !follows(3)) return 0;
    code_point = (lead & 0x07) << 18 | (at[1] & 0x3fu) << 12 | (at[2] & 0x3fu) << 6 | (at[3] & 0x3fu);
    return 4;
  }
  return 0;
}

inline bool is_ascii_space(uint32_t c) { return c == 0x20 || (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x1f); }

// Where str.split() splits: bidirectional class WS, B or S, or category Zs.
inline bool is_unicode_space(uint32_t c) {
  if (c < 0x80) return is_ascii_space(c);
  return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
         c == 0x202f || c == 0x205f || c == 0x3000;
}

}  // namespace flashtrie
