// Keeps the best `limit` items of a stream by their 64-bit rank key, with a floor that rises as they come.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace flashtrie {

// Item has a member `uint64_t key`, larger is better; keys are distinct.
template <typename Item>
class Top {
 public:
  void reset(uint64_t limit) {
    limit_ = limit;
    items_.resize(std::max<uint64_t>(limit + limit / 2, 64));
    size_ = 0;
    floor_ = 0;
  }

  // False for what cannot be among the best any more; spares the caller the work of making it.
  bool admits(uint64_t key) const { return key > floor_; }

  // Keeps the item if `wanted`. Without a branch: whether a candidate is wanted is a coin toss to the processor.
  void push_if(bool wanted, const Item& item) {
    items_[size_] = item;
    size_ += wanted;
    if (size_ == items_.size()) select();
  }

  // Leaves exactly the best `limit` (or all, if fewer), in no order.
  void select() {
    if (size_ <= limit_) return;
    deal();
    const auto cut = std::lower_bound(ends_.begin(), ends_.end(), limit_);
    std::nth_element(place(cut == ends_.begin() ? 0 : cut[-1]), place(limit_ - 1), place(*cut), better);
    size_ = limit_;
    floor_ = items_[limit_ - 1].key;
  }

  // The same, best first.
  void sort() {
    deal();
    uint32_t begin = 0;
    for (const uint32_t end : ends_) {
      if (begin >= limit_) break;
      if (end - begin > 1) std::sort(place(begin), place(end), better);
      begin = end;
    }
    size_ = std::min(size_, limit_);
  }

  std::span<const Item> items() const { return {items_.data(), size_}; }

 private:
  static bool better(const Item& a, const Item& b) { return a.key > b.key; }
  auto place(uint64_t at) { return items_.begin() + static_cast<int64_t>(at); }

  // Puts the items into about as many bins, by how far their keys lie below the best: few share one, as a rule.
  void deal() {
    uint64_t best = 0, worst = UINT64_MAX;
    for (const Item& item : items()) {
      best = std::max(best, item.key);
      worst = std::min(worst, item.key);
    }
    if (size_ == 0) worst = best;
    const int shift = std::max<int>(std::bit_width(best - worst) - std::bit_width(size_), 0);
    ends_.assign(((best - worst) >> shift) + 1, 0);
    for (const Item& item : items()) ++ends_[(best - item.key) >> shift];
    uint32_t total = 0;
    for (uint32_t& end : ends_) end = std::exchange(total, total + end);
    dealt_.resize(items_.size());
    for (const Item& item : items()) dealt_[ends_[(best - item.key) >> shift]++] = item;
    items_.swap(dealt_);
  }

  std::vector<Item> items_, dealt_;
  std::vector<uint32_t> ends_;  // of the bins
  uint64_t size_ = 0;
  uint64_t limit_ = 0;
  uint64_t floor_ = 0;
};

}  // namespace flashtrie
