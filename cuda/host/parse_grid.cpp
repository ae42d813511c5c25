#include "parse_grid.hpp"

#include <algorithm>
#include <limits>

#include "json_cursor.hpp"

namespace flashtrie {
namespace {

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
  GridParser(std::string_view line, GridLine& out) : json_(line), out_(out) {}

  bool parse(size_t max_steps) {
    return json_.take('{') && members() && json_.at_end() && tokens_.seen && logprobs_.seen && lay_out(max_steps);
  }

 private:
  bool members() {
    do {
      std::string_view name;
      if (!json_.plain_string(name) || !json_.take(':')) return false;
      if (name == "tokens") {
        if (!rows(tokens_, [this](uint32_t& token) { return parse_token(token); })) return false;
      } else if (name == "logprobs") {
        if (!rows(logprobs_, [this](float& logprob) { return parse_logprob(logprob); })) return false;
      } else if (name != "id" || !parse_id()) {
        return false;
      }
    } while (json_.take(','));
    return json_.take('}');
  }

  bool parse_id() {
    if (out_.id_end > 0) return false;  // given twice
    json_.skip_space();
    out_.id_begin = json_.offset();
    std::string_view text;
    int64_t number = 0;
    if (json_.next_is('"') ? !json_.plain_string(text) : !json_.integer(number)) return false;
    out_.id_end = json_.offset();
    return true;
  }

  template <typename T, typename ParseValue>
  bool rows(Rows<T>& rows, ParseValue parse_value) {
    if (rows.seen || !json_.take('[')) return false;
    rows.seen = true;
    if (json_.take(']')) return true;
    do {
      if (!json_.take('[')) return false;
      if (!json_.take(']')) {
        do {
          T value{};
          if (!parse_value(value)) return false;
          rows.values.push_back(value);
        } while (json_.take(','));
        if (!json_.take(']')) return false;
      }
      rows.ends.push_back(rows.values.size());
    } while (json_.take(','));
    return json_.take(']');
  }

  bool parse_token(uint32_t& token) {
    int64_t value = 0;
    if (!json_.integer(value) || value < -1) return false;
    token = value < 0 || value > kMaxInputToken ? kUnknownToken : static_cast<uint32_t>(value);
    return true;
  }

  bool parse_logprob(float& logprob) {
    std::string_view text;
    bool is_integer;
    double value = 0;
    if (!json_.number(text, is_integer) || !JsonCursor::to_double(text, value)) return false;
    logprob = static_cast<float>(value);  // rounded twice, as on the way through Python
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

  JsonCursor json_;
  GridLine& out_;
  Rows<uint32_t> tokens_;
  Rows<float> logprobs_;
};

}  // namespace

bool parse_grid_line(std::string_view line, size_t max_steps, GridLine& out) {
  return kHasFromChars && GridParser(line, out).parse(max_steps);
}

}  // namespace flashtrie
