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

void append_number(std::string& to, uint64_t value) {
  char digits[20];
  to.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr - digits);
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

void append_line(std::string& to, Lines lines, const std::vector<uint64_t>& starts, uint64_t which) {
  to.append(lines.substr(starts[which], starts[which + 1] - starts[which] - 1));
}

}  // namespace

void append_float(std::string& to, float value) {
  const float size = std::fabs(value);
  if (!std::isfinite(value)) {
    to += std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    return;
  }
  if (std::signbit(value)) to += '-';
  if (size == 0) {
    to += "0.0";
    return;
  }
  char text[24];  // d.ddde+xx
  const auto end = std::to_chars(text, text + sizeof text, size, std::chars_format::scientific).ptr;
  const char* mark = static_cast<const char*>(std::memchr(text, 'e', end - text));
  int exponent = 0;
  std::from_chars(mark + (mark[1] == '+' ? 2 : 1), end, exponent);
  std::string digits(1, text[0]);
  if (mark - text > 2) digits.append(text + 2, mark - text - 2);
  const int count = static_cast<int>(digits.size());
  if (static_cast<double>(size) < 1e-4 || size >= 1e16f) {
    to += digits[0];
    if (count > 1) to.append(".").append(digits, 1);
    to += 'e';
    to += exponent < 0 ? '-' : '+';
    if (std::abs(exponent) < 10) to += '0';
    append_number(to, std::abs(exponent));
  } else if (exponent < 0) {
    to.append("0.").append(-exponent - 1, '0').append(digits);
  } else if (count <= exponent + 1) {
    to.append(digits).append(exponent + 1 - count, '0').append(".0");
  } else {
    to.append(digits, 0, exponent + 1).append(".").append(digits, exponent + 1);
  }
}

std::vector<std::string> hit_lines(const HitColumns& columns, int num_threads) {
  const uint64_t num_hits = columns.hit_offsets[columns.num_queries];
  const auto names = find_lines(columns.names, columns.num_queries);
  const auto texts = find_lines(columns.texts, num_hits), values = find_lines(columns.values, num_hits);
  const uint64_t grain = std::max<uint64_t>(kGrainHits * columns.num_queries / std::max<uint64_t>(num_hits, 1), 1);
  std::vector<std::string> parts((columns.num_queries + grain - 1) / grain);
  parallel_for(columns.num_queries, grain, num_threads, [&](int, uint64_t begin, uint64_t end) {
    std::string& to = parts[begin / grain];
    for (uint64_t query = begin; query < end; ++query) {
      const uint64_t first = columns.hit_offsets[query], last = columns.hit_offsets[query + 1];
      for (uint64_t hit = first; hit < last; ++hit) {
        if (names.empty())
          append_number(to, columns.first_query + query);
        else
          append_line(to, columns.names, names, query);
        to += '\t';
        append_number(to, hit - first + 1);
        to += '\t';
        if (texts.empty()) {
          for (int64_t at = columns.token_offsets[hit]; at < columns.token_offsets[hit + 1]; ++at) {
            if (at > columns.token_offsets[hit]) to += ' ';
            append_number(to, columns.tokens[at]);
          }
        } else {
          append_line(to, columns.texts, texts, hit);
        }
        to += '\t';
        append_number(to, columns.key_ids[hit]);
        to += '\t';
        append_float(to, columns.scores[hit]);
        to += '\t';
        append_float(to, columns.normalised_scores[hit]);
        if (!values.empty()) {
          to += '\t';
          append_line(to, columns.values, values, hit);
        }
        to += '\n';
      }
    }
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
