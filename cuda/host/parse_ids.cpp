#include "parse_lines.hpp"

namespace flashtrie {
namespace {

// The whole word around a character that is no digit, for the error message.
Fault word_fault(LineFault code, const char* begin, const char* at, const char* end) {
  while (at < end && !is_blank(*at)) ++at;
  return {code, begin, at};
}

// Any line, fault or not.
Fault parse_id_line(std::string_view line, Buffer<uint32_t>& tokens) {
  const char* at = line.data();
  const char* const end = at + line.size();
  uint32_t* const first = tokens.room(line.size() / 2 + 1);
  uint32_t* next = first;
  for (;;) {
    while (at < end && is_blank(*at)) ++at;
    if (at == end) break;
    const char* const begin = at;
    uint64_t token = 0;
    while (at < end && is_digit(*at)) {
      token = token * 10 + static_cast<uint64_t>(*at - '0');
      if (token > kMaxInputToken) token = uint64_t(kMaxInputToken) + 1;  // stays too large, however long
      ++at;
    }
    if (at < end && !is_blank(*at)) return word_fault(LineFault::bad_token, begin, at, end);
    if (token > kMaxInputToken) return {LineFault::token_too_large, begin, at};
    *next++ = static_cast<uint32_t>(token);
  }
  tokens.set_end(next);
  if (next - first > kMaxKeyTokens) return {LineFault::too_deep, line.data(), end};
  return {};
}

uint64_t load_little_endian(const char* at) {
  uint64_t word;
  memcpy(&word, at, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

// How many of the 8 bytes, from the lowest on, are digits.
int count_digits(uint64_t word) {
  const uint64_t nibbles = word ^ 0x3030303030303030ull;
  // A digit leaves 0..9; adding 6 to more than 9 reaches the high half of its byte. Bytes above 0x7f
  // are found by their own high half, before a carry can matter, because the lowest one decides.
  const uint64_t strange = (nibbles | (nibbles + 0x0606060606060606ull)) & 0xf0f0f0f0f0f0f0f0ull;
  return strange == 0 ? 8 : __builtin_ctzll(strange) >> 3;
}

// The number that the first `count` (1 to 8) digits make: pairs, then fours, then all eight at once.
uint32_t digits_value(uint64_t word, int count) {
  word <<= 64 - 8 * count;  // leading zeros: a zero byte counts as digit 0 below
  word &= 0x0f0f0f0f0f0f0f0full;
  word = (word * 10 + (word >> 8)) & 0x00ff00ff00ff00ffull;
  word = (word * 100 + (word >> 16)) & 0x0000ffff0000ffffull;
  return static_cast<uint32_t>(word * 10000 + (word >> 32));
}

// One line of the form that almost all have: 1 to 8 digits, single spaces between, a newline at the
// end. Returns where the next line begins, or null for anything else, with nothing appended. Token
// lengths vary without a pattern, so a loop over digits would mispredict at every token.
const char* parse_usual_line(const char* at, const char* last_load, Buffer<uint32_t>& tokens) {
  uint32_t* const first = tokens.data() + tokens.size();
  uint32_t* next = first;
  while (at <= last_load) {
    const uint64_t word = load_little_endian(at);
    const int count = count_digits(word);
    if (count == 0) return nullptr;
    const char delimiter = at[count];
    if (delimiter != ' ' && delimiter != '\n') return nullptr;
    *next++ = digits_value(word, count);
    at += count + 1;
    if (delimiter == '\n') {
      if (next - first > kMaxKeyTokens) return nullptr;
      tokens.set_end(next);
      return at;
    }
  }
  return nullptr;
}

}  // namespace

void parse_ids(std::string_view block, const LineFormat& format, ParsedLines& out) {
  out.tokens.room(block.size() / 2 + 1);  // untouched memory costs nothing
  auto parse_key = [&](std::string_view key) { return parse_id_line(key, out.tokens); };
  if (format.value_column > 0 || block.size() < 9) return parse_lines(block, format, out, parse_key);
  const char* const last_load = block.data() + block.size() - 9;
  parse_lines(block, format, out, parse_key,
              [&](const char* at) { return parse_usual_line(at, last_load, out.tokens); });
}

}  // namespace flashtrie
