// What the parsers share: the loop over lines, columns, values. A parser of keys is a callable
// `Fault key(std::string_view column)` that appends the tokens of one key.
#pragma once
#include <ctype.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>
#include <system_error>

#include "parse.hpp"

namespace flashtrie {

struct Fault {
  LineFault code = LineFault::none;
  const char* begin = nullptr;
  const char* end = nullptr;
};

inline bool is_digit(char c) { return static_cast<unsigned char>(c - '0') < 10; }
inline bool is_blank(char c) { return c == ' ' || c == '\t'; }

inline std::string_view strip_blanks(std::string_view text) {
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// Digits with an optional sign, point and exponent, nothing else: what Python's float() takes, less
// its underscores, words (inf, nan) and white space.
inline bool is_number(std::string_view text) {
  size_t i = 0;
  auto digits = [&] {
    const size_t begin = i;
    while (i < text.size() && is_digit(text[i])) ++i;
    return i - begin;
  };
  if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
  size_t count = digits();
  if (i < text.size() && text[i] == '.') {
    ++i;
    count += digits();
  }
  if (count == 0) return false;
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    ++i;
    if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
    if (digits() == 0) return false;
  }
  return i == text.size();
}

// Correctly rounded, whatever the locale where the library has from_chars.
inline double to_double(std::string_view text) {
  if (text.front() == '+') text.remove_prefix(1);
#if defined(__cpp_lib_to_chars)
  double value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec == std::errc()) return value;
#endif
  return strtod(std::string(text).c_str(), nullptr);  // also says which way a value is out of range
}

inline Fault parse_value(std::string_view column, ParsedLines& out) {
  const std::string_view text = strip_blanks(column);
  const Fault fault{LineFault::bad_value, column.data(), column.data() + column.size()};
  if (text.empty()) return fault;
  uint64_t integer = 0;
  const bool is_integer = std::all_of(text.begin(), text.end(), is_digit);
  if (is_integer) {
    for (char c : text) {
      const uint64_t digit = static_cast<uint64_t>(c - '0');
      if (integer > (UINT64_MAX - digit) / 10)
        return {LineFault::value_too_large, text.data(), text.data() + text.size()};
      integer = integer * 10 + digit;
    }
  }
  if (!is_integer && !out.has_floats) {
    out.has_floats = true;
    for (size_t i = 0; i < out.int_values.size(); ++i)
      out.float_values.push_back(static_cast<double>(out.int_values[i]));
  }
  if (!out.has_floats) {
    out.int_values.push_back(integer);
    return {};
  }
  if (!is_integer && !is_number(text)) return fault;
  const double value = is_integer ? static_cast<double>(integer) : to_double(text);
  if (!std::isfinite(value)) return fault;
  out.float_values.push_back(value);
  return {};
}

// The 1-based TAB separated column, or false where the line has fewer.
inline bool find_column(std::string_view line, int column, std::string_view& found) {
  for (int at = 1; at < column; ++at) {
    const size_t tab = line.find('\t');
    if (tab == std::string_view::npos) return false;
    line.remove_prefix(tab + 1);
  }
  found = line.substr(0, line.find('\t'));
  return true;
}

// One line with a value column: the key is the first of the other columns.
template <typename ParseKey>
Fault parse_columns(std::string_view line, int value_column, ParsedLines& out, ParseKey& parse_key) {
  const Fault missing{LineFault::missing_column, line.data(), line.data() + line.size()};
  std::string_view key, value;
  if (!find_column(line, value_column == 1 ? 2 : 1, key)) {
    return strip_blanks(line).empty() ? Fault{} : missing;
  }
  const size_t num_before = out.tokens.size();
  if (const Fault fault = parse_key(key); fault.code != LineFault::none) return fault;
  if (out.tokens.size() == num_before) return {};  // no key, so the value does not matter
  if (!find_column(line, value_column, value)) return missing;
  return parse_value(value, out);
}

struct NoShortcut {
  const char* operator()(const char*) const { return nullptr; }
};

// `shortcut(at)` may parse a whole line with at least one token and return where the next begins, or
// return null and leave the line to `parse_key`.
template <typename ParseKey, typename Shortcut = NoShortcut>
void parse_lines(std::string_view block, const LineFormat& format, ParsedLines& out, ParseKey&& parse_key,
                 Shortcut&& shortcut = {}) {
  out.has_floats = format.float_values;
  out.offsets.push_back(0);
  const char* at = block.data();
  const char* const end = at + block.size();
  int64_t line_number = format.first_line;
  for (; at < end; ++line_number) {
    if (const char* next = shortcut(at); next != nullptr) {
      out.offsets.push_back(static_cast<int64_t>(out.tokens.size()));
      out.lines.push_back(line_number);
      at = next;
      continue;
    }
    const char* newline = static_cast<const char*>(memchr(at, '\n', static_cast<size_t>(end - at)));
    const char* line_end = newline != nullptr ? newline : end;
    if (line_end > at && line_end[-1] == '\r') --line_end;
    const std::string_view line(at, static_cast<size_t>(line_end - at));
    const size_t num_before = out.tokens.size();
    Fault fault =
        format.value_column > 0 ? parse_columns(line, format.value_column, out, parse_key) : parse_key(line);
    if (fault.code != LineFault::none) {
      out.fault = fault.code;
      out.fault_line = line_number;
      out.fault_begin = fault.begin - block.data();
      out.fault_end = fault.end - block.data();
      break;
    }
    if (out.tokens.size() == num_before) {
      ++out.num_empty;
    } else {
      out.offsets.push_back(static_cast<int64_t>(out.tokens.size()));
      out.lines.push_back(line_number);
    }
    at = newline != nullptr ? newline + 1 : end;
  }
  out.num_lines = line_number - format.first_line;
}

}  // namespace flashtrie
