#include "parse_lines.hpp"

namespace flashtrie {
namespace {

// The whole word around a character that is no digit, for the error message.
Fault word_fault(LineFault code, const char* begin, const char* at, const char* end) {
  while (at < end && !is_blank(*at)) ++at;
  return {code, begin, at};
}

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
      if (token > kMaxToken) token = uint64_t(kMaxToken) + 1;  // stays too large: no overflow from long numbers
      ++at;
    }
    if (at < end && !is_blank(*at)) return word_fault(LineFault::bad_token, begin, at, end);
    if (token > kMaxToken) return {LineFault::token_too_large, begin, at};
    *next++ = static_cast<uint32_t>(token);
  }
  tokens.set_end(next);
  if (next - first > kMaxDepth) return {LineFault::too_deep, line.data(), end};
  return {};
}

}  // namespace

void parse_ids(std::string_view block, const LineFormat& format, ParsedLines& out) {
  out.tokens.room(block.size() / 5 + 16);
  parse_lines(block, format, out, [&](std::string_view key) { return parse_id_line(key, out.tokens); });
}

}  // namespace flashtrie
