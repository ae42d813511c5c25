#include "string_sort.hpp"

#include <algorithm>
#include <cstring>

namespace flashtrie {
namespace {

constexpr size_t kHead = 8;
// From here on eight passes over the records beat comparisons, whose branches nobody can predict.
constexpr size_t kRadixCount = 700;

struct Record {
  uint64_t key;  // the next eight bytes as a number, zeros behind the end
  uint32_t index;
  uint32_t used;  // how many of them are the string's own; kHead + 1 if it goes on
};

uint64_t head_of(const char* text, size_t size) {
  uint64_t head = 0;
  if (size >= kHead) {
    memcpy(&head, text, kHead);
    return __builtin_bswap64(head);
  }
  for (size_t i = 0; i < kHead; ++i) head = head << 8 | (i < size ? static_cast<uint8_t>(text[i]) : 0);
  return head;
}

class Sorter {
 public:
  explicit Sorter(const std::vector<std::string_view>& strings) : strings_(strings), records_(strings.size()) {
    for (size_t i = 0; i < strings.size(); ++i) records_[i].index = static_cast<uint32_t>(i);
  }

  std::vector<std::string_view> run() {
    sort(0, records_.size(), 0);
    std::vector<std::string_view> sorted;
    sorted.reserve(records_.size());
    for (const Record& record : records_) {
      const std::string_view text = strings_[record.index];
      if (sorted.empty() || sorted.back() != text) sorted.push_back(text);
    }
    return sorted;
  }

 private:
  // Records [first, last) agree on all bytes before `depth`.
  void sort(size_t first, size_t last, size_t depth) {
    bool is_sorted = true;
    for (size_t i = first; i < last; ++i) {
      const std::string_view text = strings_[records_[i].index];
      const size_t rest = text.size() - depth;
      records_[i].key = head_of(text.data() + depth, rest);
      records_[i].used = static_cast<uint32_t>(std::min(rest, kHead + 1));
      is_sorted = is_sorted && (i == first || records_[i - 1].key < records_[i].key);
    }
    if (is_sorted) return;
    if (last - first >= kRadixCount) {
      if (other_.size() < last - first) other_.resize(last - first);
      radix_sort(&records_[first], other_.data(), last - first, 0, kHead);
    } else {
      std::sort(records_.begin() + first, records_.begin() + last,
                [](const Record& a, const Record& b) { return a.key < b.key; });
    }
    for (size_t begin = first; begin < last;) {
      size_t end = begin + 1;
      while (end < last && records_[end].key == records_[begin].key) ++end;
      if (end - begin > 1) sort_equal(begin, end, depth);
      begin = end;
    }
  }

  // Equal heads: a string that ends within its head comes first, unless NUL bytes hide where it ends.
  void sort_equal(size_t first, size_t last, size_t depth) {
    std::sort(records_.begin() + first, records_.begin() + last,
              [](const Record& a, const Record& b) { return a.used < b.used; });
    while (first < last && records_[first].used <= kHead) ++first;
    if (last - first > 1) sort(first, last, depth + kHead);
  }

  const std::vector<std::string_view>& strings_;
  std::vector<Record> records_;
  std::vector<Record> other_;
};

}  // namespace

void sort_unique(std::vector<std::string_view>& strings) { strings = Sorter(strings).run(); }

}  // namespace flashtrie
