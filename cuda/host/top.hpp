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

  // Takes what another has kept.
  void merge(const Top& other) {
    for (const Item& item : other.items()) push_if(admits(item.key), item);
  }

  // Leaves exactly the best `limit` (or all, if fewer), in no order.
  void select() {
    if (size_ <= limit_) return;
    auto better = [](const Item& a, const Item& b) { return a.key > b.key; };
    const auto begin = items_.begin();
    std::nth_element(begin, begin + static_cast<int64_t>(limit_ - 1), begin + static_cast<int64_t>(size_), better);
    size_ = limit_;
    floor_ = items_[limit_ - 1].key;
  }

  // Best first. Items are dealt into about as many bins, by how far their keys lie below the best, so few share one.
  void sort() {
    if (size_ < 2) return;
    uint64_t best = 0, worst = UINT64_MAX;
    for (const Item& item : items()) {
      best = std::max(best, item.key);
      worst = std::min(worst, item.key);
    }
    const int shift = std::max<int>(std::bit_width(best - worst) - std::bit_width(size_), 0);
    ends_.assign(((best - worst) >> shift) + 1, 0);
    for (const Item& item : items()) ++ends_[(best - item.key) >> shift];
    uint32_t total = 0;
    for (uint32_t& end : ends_) end = std::exchange(total, total + end);
    sorted_.resize(items_.size());
    for (const Item& item : items()) sorted_[ends_[(best - item.key) >> shift]++] = item;
    items_.swap(sorted_);
    auto begin = items_.begin();
    for (const uint32_t end : ends_) {
      const auto last = items_.begin() + end;
      if (last - begin > 1) std::sort(begin, last, [](const Item& a, const Item& b) { return a.key > b.key; });
      begin = last;
    }
  }

  std::span<const Item> items() const { return {items_.data(), size_}; }

 private:
  std::vector<Item> items_, sorted_;
  std::vector<uint32_t> ends_;  // of the bins of a sort
  uint64_t size_ = 0;
  uint64_t limit_ = 0;
  uint64_t floor_ = 0;
};

}  // namespace flashtrie
