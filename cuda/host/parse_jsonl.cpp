#include "parse_jsonl.hpp"

#include <cmath>
#include <limits>

#include "json_cursor.hpp"

namespace flashtrie {
namespace {

struct JsonValue {
  bool is_given = false;
  bool is_integer = false;  // unsigned, of 64 bits
  uint64_t integer = 0;
  double number = 0;
};

bool parse_ids_array(JsonCursor& json, Buffer<uint32_t>& tokens) {
  if (!json.take('[')) return false;
  if (json.take(']')) return true;
  const size_t first = tokens.size();
  do {
    int64_t token = 0;
    if (!json.integer(token) || token < 0 || token > static_cast<int64_t>(kMaxInputToken)) return false;
    tokens.push_back(static_cast<uint32_t>(token));
  } while (json.take(','));
  return json.take(']') && tokens.size() - first <= static_cast<size_t>(kMaxKeyTokens);
}

bool parse_value(JsonCursor& json, JsonValue& value) {
  std::string_view text;
  bool is_integer;
  if (value.is_given || !json.number(text, is_integer)) return false;
  value.is_given = true;
  if (is_integer && text.front() != '-') {
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value.integer);
    value.is_integer = true;
    value.number = static_cast<double>(value.integer);
    return result.ec == std::errc();
  }
  return text != "-0" && JsonCursor::to_double(text, value.number);  // Python's -0 is the integer 0
}

// Tokens are appended even where the line then turns out unusual; the caller takes them back.
bool parse_line(std::string_view line, Buffer<uint32_t>& tokens, JsonValue& value) {
  JsonCursor json(line);
  if (json.next_is('[')) return parse_ids_array(json, tokens) && json.at_end();
  if (!json.take('{')) return false;
  bool has_tokens = false;
  do {
    std::string_view name;
    if (!json.plain_string(name) || !json.take(':')) return false;
    if (name == "tokens") {
      if (has_tokens || !parse_ids_array(json, tokens)) return false;
      has_tokens = true;
    } else if (name == "value" ? !parse_value(json, value) : !json.skip_scalar()) {
      return false;
    }
  } while (json.take(','));
  return json.take('}') && json.at_end() && has_tokens;
}

void append_value(const JsonValue& value, ParsedLines& out) {
  if (!value.is_integer && !out.has_floats) {
    out.has_floats = true;
    for (size_t i = 0; i < out.int_values.size(); ++i)
      out.float_values.push_back(static_cast<double>(out.int_values[i]));
  }
  if (out.has_floats) {
    out.float_values.push_back(value.number);
  } else {
    out.int_values.push_back(value.integer);
  }
}

bool is_blank_line(std::string_view line) { return line.find_first_not_of(" \t\r\v\f") == std::string_view::npos; }

}  // namespace

size_t parse_jsonl_keys(std::string_view block, int64_t first_line, JsonValues& values, bool float_values,
                        ParsedLines& out) {
  out.has_floats = float_values;
  out.offsets.push_back(0);
  size_t at = 0;
  while (kHasFromChars && at < block.size()) {
    const size_t newline = block.find('\n', at);
    const size_t line_end = newline == std::string_view::npos ? block.size() : newline;
    const std::string_view line = block.substr(at, line_end - at);
    if (is_blank_line(line)) {
      ++out.num_empty;
    } else {
      const size_t num_before = out.tokens.size();
      JsonValue value;
      const bool is_usual = parse_line(line, out.tokens, value);
      const JsonValues given = value.is_given ? JsonValues::present : JsonValues::absent;
      if (!is_usual || (values != JsonValues::unknown && values != given)) {
        out.tokens.truncate(num_before);
        break;
      }
      values = given;
      if (value.is_given) append_value(value, out);
      out.offsets.push_back(static_cast<int64_t>(out.tokens.size()));
      out.lines.push_back(first_line + out.num_lines);
    }
    ++out.num_lines;
    at = newline == std::string_view::npos ? block.size() : newline + 1;
  }
  return at;
}

}  // namespace flashtrie
