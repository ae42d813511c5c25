// Random and spoilt input for the parsers, in buffers of exact size, to be run under ASan and UBSan:
//   g++ -std=c++20 -g -O1 -fsanitize=address,undefined -Icuda tests/native/fuzz_parsers.cpp cuda/host/parse_*.cpp
#include <stdio.h>
#include <stdlib.h>

#include <memory>
#include <string>
#include <vector>

#include "fuzz.hpp"
#include "host/parse_grid.hpp"
#include "host/parse_jsonl.hpp"
#include "host/parse_words.hpp"

using namespace flashtrie;

namespace {

// Heap memory of exactly the text's size, so that a read past its end is seen.
class Exact {
 public:
  explicit Exact(const std::string& text) : data_(new char[text.size()]), size_(text.size()) {
    text.copy(data_.get(), size_);
  }
  operator std::string_view() const { return {data_.get(), size_}; }

 private:
  std::unique_ptr<char[]> data_;
  size_t size_;
};

std::string random_text(const std::vector<std::string>& pieces) {
  std::string text;
  for (size_t n = below(40); n > 0; --n) {
    if (below(8) == 0) text.push_back(static_cast<char>(below(256)));
    text += pieces[below(pieces.size())];
  }
  return text;
}

const std::vector<std::string> kIds = {"1", "42", "12345678", "123456789", "2147483647", "2147483648", " ", " ", "\t",
                                       "\n", "\n", "\r\n", "x", "-1", "0.5", "1e5", "00000000000000000000"};
const std::vector<std::string> kWords = {"a", "word", "exactly8", "longerthan8", "\xc3\xa9", "\xe2\x82\xac",
                                         "\xf0\x9f\x98\x80", "\xe3\x80\x80", " ", " ", "\t", "\n", "\r\n", "\xed\xa0", "\xc3"};
const std::vector<std::string> kGrid = {"{", "}", "[", "]", "[[", "]]", ",", ",", ":", "\"id\"", "\"tokens\":[[1]]",
                                        "\"logprobs\":[[-1.5]]", "1", "-0.25", "1e9", "\"", "\\", " "};

void check(const ParsedLines& parsed, size_t size, size_t num_words) {
  CHECK(parsed.offsets.size() == parsed.lines.size() + 1);
  CHECK(parsed.offsets[0] == 0);
  const auto num_tokens = static_cast<int64_t>(parsed.tokens.size());
  for (size_t i = 0; i + 1 < parsed.offsets.size(); ++i) CHECK(parsed.offsets[i] < parsed.offsets[i + 1]);
  CHECK(parsed.offsets[parsed.offsets.size() - 1] <= num_tokens);
  for (size_t i = 0; i < parsed.tokens.size(); ++i)
    CHECK(parsed.tokens[i] <= kMaxInputToken && (num_words == 0 || parsed.tokens[i] < num_words));
  CHECK(parsed.fault_begin >= 0 && parsed.fault_begin <= parsed.fault_end);
  CHECK(parsed.fault_end <= static_cast<int64_t>(size));
}

LineFormat random_format() { return {static_cast<int64_t>(below(5)), static_cast<int>(below(4)), below(2) == 0}; }

std::string spoilt_grid() {
  std::string line = R"({"id": "x", "tokens": [[1, 2], [70000]], "logprobs": [[-1, -2.5], [-0.125e1]]})";
  for (size_t n = below(3); n > 0; --n) line.replace(below(line.size()), below(4), kGrid[below(kGrid.size())]);
  return below(8) == 0 ? line.substr(0, below(line.size() + 1)) : line;
}

std::string spoilt_keys() {
  std::string text;
  for (size_t n = below(4); n > 0; --n) {
    std::string line = below(2) == 0 ? "[1, 2147483647, 3]" : R"({"tokens": [7, 70000], "text": "\u00e9 \"", "value": -1.5})";
    if (below(2) == 0) line.replace(below(line.size()), below(4), kGrid[below(kGrid.size())]);
    text += line + (below(4) == 0 ? "\r\n" : "\n");
  }
  return below(4) == 0 ? text.substr(0, below(text.size() + 1)) : text;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 20000;
  source.seed(20240);
  WordTable table;
  size_t num_grids = 0;
  for (int round = 0; round < rounds; ++round) {
    const Exact ids(random_text(kIds)), words(random_text(kWords)), grid(below(2) == 0 ? random_text(kGrid) : spoilt_grid());
    ParsedLines parsed_ids, grown, found;
    parse_ids(ids, random_format(), parsed_ids);
    check(parsed_ids, std::string_view(ids).size(), 0);
    const LineFormat format = random_format();
    table.parse(words, format, true, grown);
    check(grown, std::string_view(words).size(), table.num_words());
    table.parse(words, format, false, found);
    CHECK(found.tokens.size() == grown.tokens.size());
    for (size_t i = 0; i < found.tokens.size(); ++i) CHECK(found.tokens[i] == grown.tokens[i]);
    GridLine line;
    num_grids += parse_grid_line(grid, 1 + below(3), line);
    CHECK(line.tokens.size() == line.logprobs.size());
    const Exact keys(spoilt_keys());
    ParsedLines parsed_keys;
    JsonValues values = JsonValues::unknown;
    CHECK(parse_jsonl_keys(keys, 1, values, false, parsed_keys) <= std::string_view(keys).size());
    CHECK(parsed_keys.offsets.size() == parsed_keys.lines.size() + 1);
    CHECK(parsed_keys.offsets[parsed_keys.lines.size()] == static_cast<int64_t>(parsed_keys.tokens.size()));
    const size_t num_values = parsed_keys.has_floats ? parsed_keys.float_values.size() : parsed_keys.int_values.size();
    CHECK(num_values == (values == JsonValues::present ? parsed_keys.lines.size() : 0));
  }
  const std::vector<uint32_t> order = table.sorted_ids();
  for (size_t i = 0; i + 1 < order.size(); ++i) CHECK(table.word(order[i]) < table.word(order[i + 1]));
  for (uint32_t id = 0; id < table.num_words(); ++id) CHECK(table.find(table.word(id)) == id);
  printf("%d rounds, %zu words, %zu grids\n", rounds, table.num_words(), num_grids);
  return 0;
}
