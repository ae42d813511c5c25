#include "parse_grid.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace flashtrie {
namespace {

#if defined(__cpp_lib_to_chars)

constexpr size_t kMaxTokenDigits = 18;  // fits 64 bits; longer ones are Python's

// Rows of one array, flat.
template <typename T>
struct Rows {
  Buffer<T> values;
  Buffer<size_t> ends;
  bool seen = false;

  size_t size(size_t row) const { return ends[row] - (row > 0 ? ends[row - 1] : 0); }
};

class GridParser {
 public:
  GridParser(std::string_view line, GridLine& out) : at_(line.data()), begin_(at_), end_(at_ + line.size()), out_(out) {}

  bool parse(size_t max_steps) {
    if (!take('{') || !members() || !(skip_space(), at_ == end_)) return false;
    return tokens_.seen && logprobs_.seen && lay_out(max_steps);
  }

 private:
  void skip_space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r' || *at_ == '\n')) ++at_;
  }

  bool take(char wanted) {
    skip_space();
    if (at_ == end_ || *at_ != wanted) return false;
    ++at_;
    return true;
  }

  bool members() {
    do {
      std::string_view name;
      if (!take('"') || !plain_string(name) || !take(':')) return false;
      if (name == "tokens") {
        if (!rows(tokens_, [this](uint32_t& token) { return parse_token(token); })) return false;
      } else if (name == "logprobs") {
        if (!rows(logprobs_, [this](float& logprob) { return parse_logprob(logprob); })) return false;
      } else if (name != "id" || !parse_id()) {
        return false;
      }
    } while (take(','));
    return take('}');
  }

  // Up to the closing quote, of printable ASCII without escapes.
  bool plain_string(std::string_view& text) {
    const char* const first = at_;
    while (at_ < end_ && *at_ >= 0x20 && *at_ < 0x7f && *at_ != '"' && *at_ != '\\') ++at_;
    text = {first, static_cast<size_t>(at_ - first)};
    if (at_ == end_ || *at_ != '"') return false;
    ++at_;
    return true;
  }

  bool parse_id() {
    if (out_.id_end > 0) return false;  // given twice
    skip_space();
    out_.id_begin = static_cast<size_t>(at_ - begin_);
    std::string_view text;
    if (at_ < end_ && *at_ == '"') {
      ++at_;
      if (!plain_string(text)) return false;
    } else if (!integer(text)) {
      return false;
    }
    out_.id_end = static_cast<size_t>(at_ - begin_);
    return true;
  }

  template <typename T, typename ParseValue>
  bool rows(Rows<T>& rows, ParseValue parse_value) {
    if (rows.seen || !take('[')) return false;
    rows.seen = true;
    if (take(']')) return true;
    do {
      if (!take('[')) return false;
      if (!take(']')) {
        do {
          skip_space();
          T value;
          if (!parse_value(value)) return false;
          rows.values.push_back(value);
        } while (take(','));
        if (!take(']')) return false;
      }
      rows.ends.push_back(rows.values.size());
    } while (take(','));
    return take(']');
  }

  static bool digit(char c) { return static_cast<unsigned char>(c - '0') < 10; }

  // -?(0|[1-9][0-9]*), which must not go on as a fraction.
  bool integer(std::string_view& text) {
    const char* const first = at_;
    if (at_ < end_ && *at_ == '-') ++at_;
    const char* const digits = at_;
    while (at_ < end_ && digit(*at_)) ++at_;
    text = {first, static_cast<size_t>(at_ - first)};
    if (at_ == digits || (*digits == '0' && at_ > digits + 1) || text.size() > kMaxTokenDigits) return false;
    return at_ == end_ || (*at_ != '.' && *at_ != 'e' && *at_ != 'E');
  }

  bool parse_token(uint32_t& token) {
    std::string_view text;
    if (!integer(text)) return false;
    int64_t value = 0;
    std::from_chars(text.data(), text.data() + text.size(), value);
    if (value < -1) return false;
    token = value < 0 || value > kMaxInputToken ? kUnknownToken : static_cast<uint32_t>(value);
    return true;
  }

  bool parse_logprob(float& logprob) {
    const char* const first = at_;
    if (at_ < end_ && *at_ == '-') ++at_;
    const char* const digits = at_;
    while (at_ < end_ && digit(*at_)) ++at_;
    if (at_ == digits || (*digits == '0' && at_ > digits + 1)) return false;
    if (at_ < end_ && *at_ == '.') {
      const char* const fraction = ++at_;
      while (at_ < end_ && digit(*at_)) ++at_;
      if (at_ == fraction) return false;
    }
    if (at_ < end_ && (*at_ == 'e' || *at_ == 'E')) {
      ++at_;
      if (at_ < end_ && (*at_ == '+' || *at_ == '-')) ++at_;
      const char* const exponent = at_;
      while (at_ < end_ && digit(*at_)) ++at_;
      if (at_ == exponent) return false;
    }
    double value = 0;  // rounded twice, to float64 and then to float32, as on the way through Python
    const auto result = std::from_chars(first, at_, value);
    if (result.ec != std::errc() || result.ptr != at_) return false;
    logprob = static_cast<float>(value);
    return logprob < std::numeric_limits<float>::infinity();
  }

  bool lay_out(size_t max_steps) {
    const size_t num_steps = std::min(tokens_.ends.size(), max_steps);
    if (num_steps != std::min(logprobs_.ends.size(), max_steps)) return false;
    size_t num_slots = 0;
    for (size_t step = 0; step < num_steps; ++step) {
      if (tokens_.size(step) != logprobs_.size(step)) return false;
      num_slots = std::max(num_slots, tokens_.size(step));
    }
    out_.num_steps = num_steps;
    out_.num_slots = num_slots;
    uint32_t* tokens = out_.tokens.room(num_steps * num_slots);
    float* logprobs = out_.logprobs.room(num_steps * num_slots);
    for (size_t step = 0; step < num_steps; ++step) {
      const size_t count = tokens_.size(step), from = tokens_.ends[step] - count;
      std::copy_n(tokens_.values.data() + from, count, tokens);
      std::copy_n(logprobs_.values.data() + from, count, logprobs);
      std::fill(tokens + count, tokens + num_slots, kUnknownToken);
      std::fill(logprobs + count, logprobs + num_slots, -std::numeric_limits<float>::infinity());
      tokens += num_slots;
      logprobs += num_slots;
    }
    out_.tokens.set_end(tokens);
    out_.logprobs.set_end(logprobs);
    return true;
  }

  const char* at_;
  const char* const begin_;
  const char* const end_;
  GridLine& out_;
  Rows<uint32_t> tokens_;
  Rows<float> logprobs_;
};

#endif

}  // namespace

bool parse_grid_line([[maybe_unused]] std::string_view line, [[maybe_unused]] size_t max_steps,
                     [[maybe_unused]] GridLine& out) {
#if defined(__cpp_lib_to_chars)
  return GridParser(line, out).parse(max_steps);
#else
  return false;  // without an exact, locale-free number parser, Python reads every line
#endif
}

}  // namespace flashtrie
