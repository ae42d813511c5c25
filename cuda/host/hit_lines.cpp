#include "hit_lines.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "threads.hpp"

namespace flashtrie {
namespace {

constexpr uint64_t kGrainHits = 4096;  // some 300 KB of lines: more than enough to pay for a thread's turn

constexpr size_t kNumberChars = 20, kTokenChars = 11;  // of any number; of a token and the blank before it
constexpr size_t kFloatChars = 24;                     // the longest are 17 digits and a point
constexpr size_t kLineChars = 2 * kNumberChars + 2 * kFloatChars + 7;  // all but the name, the key and the value

char* put_number(char* to, uint64_t value) { return std::to_chars(to, to + kNumberChars, value).ptr; }

char* put(char* to, std::string_view text) {
  std::memcpy(to, text.data(), text.size());
  return to + text.size();
}

// The shortest decimal that reads back as the same float32: `-1.5`, `1.0`; with an exponent, `1e-05`, below 1e-4 and from
// 1e16.
char* put_float(char* to, float value) {
  const float size = std::fabs(value);
  if (!std::isfinite(value)) return put(to, std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
  if (std::signbit(value)) *to++ = '-';
  if (size == 0) return put(to, "0.0");
  char text[kFloatChars];  // d.ddde+xx
  const auto end = std::to_chars(text, text + sizeof text, size, std::chars_format::scientific).ptr;
  const char* mark = static_cast<const char*>(std::memchr(text, 'e', end - text));
  int exponent = 0;
  std::from_chars(mark + (mark[1] == '+' ? 2 : 1), end, exponent);
  text[1] = text[0];  // over the point, so that the digits are of a piece
  const std::string_view digits = mark - text > 2 ? std::string_view(text + 1, mark - text - 1) : std::string_view(text, 1);
  const int count = static_cast<int>(digits.size()), whole = exponent + 1;
  if (static_cast<double>(size) < 1e-4 || size >= 1e16f) {
    *to++ = digits[0];
    if (count > 1) to = put(put(to, "."), digits.substr(1));
    to = put(put(to, "e"), exponent < 0 ? "-" : "+");
    if (std::abs(exponent) < 10) *to++ = '0';
    return put_number(to, std::abs(exponent));
  }
  if (exponent < 0) {
    to = put(to, "0.");
    to = std::fill_n(to, -exponent - 1, '0');
    return put(to, digits);
  }
  if (count <= whole) {
    to = std::fill_n(put(to, digits), whole - count, '0');
    return put(to, ".0");
  }
  return put(put(put(to, digits.substr(0, whole)), "."), digits.substr(whole));
}

// Where each of `count` lines begins, and where the last one ends.
std::vector<uint64_t> find_lines(Lines lines, uint64_t count) {
  std::vector<uint64_t> starts;
  if (lines.empty()) return starts;
  starts.reserve(count + 1);
  uint64_t at = 0;
  for (uint64_t line = 0; line < count; ++line) {
    starts.push_back(at);
    const size_t end = lines.find('\n', at);
    if (end == Lines::npos) throw std::invalid_argument("fewer lines than hits or queries");
    at = end + 1;
  }
  starts.push_back(at);
  return starts;
}

std::string_view line_at(Lines lines, const std::vector<uint64_t>& starts, uint64_t which) {
  return lines.substr(starts[which], starts[which + 1] - starts[which] - 1);
}

// Columns with what finds their lines.
struct FoundColumns {
  const HitColumns& columns;
  std::vector<uint64_t> names, texts, values;

  size_t most_chars(uint64_t query, std::string_view name) const;
  char* put_hits(char* to, uint64_t query, std::string_view name) const;
  char* put_key(char* to, uint64_t hit) const;
};

// Of the lines of a query.
size_t FoundColumns::most_chars(uint64_t query, std::string_view name) const {
  const uint64_t first = columns.hit_offsets[query], last = columns.hit_offsets[query + 1];
  size_t chars = (last - first) * (name.size() + kLineChars + 1);
  chars += texts.empty() ? kTokenChars * (columns.token_offsets[last] - columns.token_offsets[first])
                         : texts[last] - texts[first];
  return values.empty() ? chars : chars + values[last] - values[first];
}

char* FoundColumns::put_hits(char* to, uint64_t query, std::string_view name) const {
  const uint64_t first = columns.hit_offsets[query], last = columns.hit_offsets[query + 1];
  for (uint64_t hit = first; hit < last; ++hit) {
    to = put(put(to, name), "\t");
    to = put(put_number(to, hit - first + 1), "\t");
    to = put(put_key(to, hit), "\t");
    to = put(put_number(to, columns.key_ids[hit]), "\t");
    to = put(put_float(to, columns.scores[hit]), "\t");
    to = put_float(to, columns.normalised_scores[hit]);
    if (!values.empty()) to = put(put(to, "\t"), line_at(columns.values, values, hit));
    *to++ = '\n';
  }
  return to;
}

// The key's text, else its tokens.
char* FoundColumns::put_key(char* to, uint64_t hit) const {
  if (!texts.empty()) return put(to, line_at(columns.texts, texts, hit));
  const int64_t first = columns.token_offsets[hit], last = columns.token_offsets[hit + 1];
  for (int64_t at = first; at < last; ++at) {
    if (at > first) *to++ = ' ';
    to = put_number(to, columns.tokens[at]);
  }
  return to;
}

}  // namespace

std::vector<std::string> hit_lines(const HitColumns& columns, int num_threads) {
  const uint64_t num_hits = columns.hit_offsets[columns.num_queries];
  const FoundColumns found{columns, find_lines(columns.names, columns.num_queries), find_lines(columns.texts, num_hits),
                           find_lines(columns.values, num_hits)};
  const uint64_t grain = std::max<uint64_t>(kGrainHits * columns.num_queries / std::max<uint64_t>(num_hits, 1), 1);
  std::vector<std::string> parts((columns.num_queries + grain - 1) / grain);
  parallel_for(columns.num_queries, grain, num_threads, [&](int, uint64_t begin, uint64_t end) {
    char number[kNumberChars];
    const auto name_of = [&](uint64_t query) {
      if (!found.names.empty()) return line_at(columns.names, found.names, query);
      return std::string_view(number, put_number(number, columns.first_query + query) - number);
    };
    size_t chars = 0;
    for (uint64_t query = begin; query < end; ++query) chars += found.most_chars(query, name_of(query));
    std::string& to = parts[begin / grain];
    to.resize(chars);
    char* at = to.data();
    for (uint64_t query = begin; query < end; ++query) at = found.put_hits(at, query, name_of(query));
    to.resize(at - to.data());
  });
  return parts;
}

void join_parts(const std::vector<std::string>& parts, char* to, int num_threads) {
  std::vector<size_t> begins(parts.size());
  size_t at = 0;
  for (size_t part = 0; part < parts.size(); ++part) {
    begins[part] = at;
    at += parts[part].size();
  }
  parallel_for(parts.size(), 1, num_threads, [&](int, uint64_t begin, uint64_t end) {
    for (uint64_t part = begin; part < end; ++part)
      std::memcpy(to + begins[part], parts[part].data(), parts[part].size());
  });
}

}  // namespace flashtrie
