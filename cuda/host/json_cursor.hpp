// The pieces of JSON that the parsers of usual lines meet. Each function advances over its piece and
// returns true, or returns false anywhere; the caller then leaves the whole line to Python.
#pragma once
#include <charconv>
#include <system_error>

#include "parse.hpp"
#include "utf8.hpp"

namespace flashtrie {

// Without an exact, locale-free number parser, Python reads every line.
#if defined(__cpp_lib_to_chars)
constexpr bool kHasFromChars = true;
#else
constexpr bool kHasFromChars = false;
#endif

class JsonCursor {
 public:
  explicit JsonCursor(std::string_view text) : at_(text.data()), begin_(at_), end_(at_ + text.size()) {}

  size_t offset() const { return static_cast<size_t>(at_ - begin_); }

  void skip_space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
  }

  bool at_end() {
    skip_space();
    return at_ == end_;
  }

  bool next_is(char wanted) {
    skip_space();
    return at_ < end_ && *at_ == wanted;
  }

  bool take(char wanted) {
    if (!next_is(wanted)) return false;
    ++at_;
    return true;
  }

  // A whole string of printable ASCII without escapes.
  bool plain_string(std::string_view& text) {
    if (!take('"')) return false;
    const char* const first = at_;
    while (at_ < end_ && *at_ >= 0x20 && *at_ < 0x7f && *at_ != '"' && *at_ != '\\') ++at_;
    text = {first, static_cast<size_t>(at_ - first)};
    if (at_ == end_ || *at_ != '"') return false;
    ++at_;
    return true;
  }

  // Any valid string, its meaning passed over.
  bool skip_string() {
    if (!take('"')) return false;
    while (at_ < end_ && *at_ != '"') {
      if (static_cast<unsigned char>(*at_) < 0x20) return false;
      if (*at_ == '\\') {
        if (!skip_escape()) return false;
        continue;
      }
      uint32_t code_point;
      const int size = decode_utf8(reinterpret_cast<const unsigned char*>(at_),
                                   reinterpret_cast<const unsigned char*>(end_), code_point);
      if (size == 0) return false;
      at_ += size;
    }
    return take('"');
  }

  // -?(0|[1-9][0-9]*) of at most 18 characters that does not go on as a fraction.
  bool integer(int64_t& value) {
    skip_space();
    const char* const first = at_;
    if (!whole_part() || at_ - first > 18) return false;
    if (at_ < end_ && (*at_ == '.' || *at_ == 'e' || *at_ == 'E')) return false;
    std::from_chars(first, at_, value);
    return true;
  }

  // A number as text; `is_integer` tells whether it has neither point nor exponent.
  bool number(std::string_view& text, bool& is_integer) {
    skip_space();
    const char* const first = at_;
    if (!whole_part()) return false;
    is_integer = true;
    if (at_ < end_ && *at_ == '.') {
      ++at_;
      is_integer = false;
      if (!digits()) return false;
    }
    if (at_ < end_ && (*at_ == 'e' || *at_ == 'E')) {
      ++at_;
      is_integer = false;
      if (at_ < end_ && (*at_ == '+' || *at_ == '-')) ++at_;
      if (!digits()) return false;
    }
    text = {first, static_cast<size_t>(at_ - first)};
    return true;
  }

  // Correctly rounded; false where it is out of range.
  static bool to_double([[maybe_unused]] std::string_view text, [[maybe_unused]] double& value) {
#if defined(__cpp_lib_to_chars)
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    return result.ec == std::errc() && result.ptr == text.data() + text.size();
#else
    return false;
#endif
  }

  // A string, a number, true, false or null.
  bool skip_scalar() {
    skip_space();
    if (at_ == end_) return false;
    if (*at_ == '"') return skip_string();
    for (std::string_view word : {"true", "false", "null"}) {
      if (static_cast<size_t>(end_ - at_) >= word.size() && std::string_view(at_, word.size()) == word) {
        at_ += word.size();
        return true;
      }
    }
    std::string_view text;
    bool is_integer;
    // Python refuses integers of thousands of digits.
    return number(text, is_integer) && text.size() < 100;
  }

 private:
  static bool is_digit(char c) { return static_cast<unsigned char>(c - '0') < 10; }

  bool digits() {
    const char* const first = at_;
    while (at_ < end_ && is_digit(*at_)) ++at_;
    return at_ > first;
  }

  bool whole_part() {
    if (at_ < end_ && *at_ == '-') ++at_;
    const char* const first = at_;
    return digits() && (*first != '0' || at_ == first + 1);
  }

  bool skip_escape() {
    ++at_;
    if (at_ == end_) return false;
    const char kind = *at_++;
    if (kind != 'u') return memchr("\"\\/bfnrt", kind, 8) != nullptr;
    for (int i = 0; i < 4; ++i, ++at_) {
      if (at_ == end_) return false;
      const char c = *at_;
      if (!is_digit(c) && !(c >= 'a' && c <= 'f') && !(c >= 'A' && c <= 'F')) return false;
    }
    return true;
  }

  const char* at_;
  const char* const begin_;
  const char* const end_;
};

}  // namespace flashtrie
