// Keeps the best `limit` items of a stream by their 64-bit rank key, with a floor that rises as they come.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "flashtrie/score.cuh"
#include "unfilled.hpp"

namespace flashtrie {

// Item has a member `uint64_t key`, larger is better; keys are distinct.
template <typename Item>
class Top {
 public:
  // Room for `most_pushed` items at once.
  explicit Top(uint64_t most_pushed) : most_pushed_(most_pushed) {}

  void reset(uint64_t limit) {
    limit_ = limit;
    full_ = std::max<uint64_t>(limit + limit / 2, 64);
    items_.resize(full_ + most_pushed_);
    size_ = 0;
    floor_ = 0;
  }

  // What scores below it cannot be among the best any more; spares the caller the work of making it.
  float floor_score() const { return floor_ == 0 ? -INFINITY : key_score(floor_); }

  // Calls make(i, item), which writes item i and says whether it is wanted, for each i below `count`. Those below the
  // floor are dropped too. Without a branch: whether a candidate is wanted is a coin toss to the processor.
  template <typename Make>
  void push(uint64_t count, const Make& make) {
    const uint64_t floor = floor_;
    Item* end = items_.data() + size_;
    for (uint64_t i = 0; i < count; ++i) {
      const bool is_wanted = make(i, *end);
      end += is_wanted & (end->key > floor);
    }
    size_ = static_cast<uint64_t>(end - items_.data());
    if (size_ >= full_) select();
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
      if (end - begin > kFewInBin) std::sort(place(begin), place(end), better);
      begin = end;
    }
    // Bins of a few are put in order in one go: which of them holds how many cannot be foretold.
    Item* const items = items_.data();
    for (uint32_t i = 1; i < begin; ++i) {
      const Item item = items[i];
      uint32_t at = i;
      for (; at > 0 && items[at - 1].key < item.key; --at) items[at] = items[at - 1];
      items[at] = item;
    }
    size_ = std::min(size_, limit_);
  }

  std::span<const Item> items() const { return {items_.data(), size_}; }

 private:
  static constexpr uint32_t kFewInBin = 8;

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
    dealt_.resize(items_.size());
    uint32_t* const ends = ends_.data();
    Item* const dealt = dealt_.data();
    for (const Item& item : items()) ++ends[(best - item.key) >> shift];
    uint32_t total = 0;
    for (uint32_t& end : ends_) end = std::exchange(total, total + end);
    for (const Item& item : items()) dealt[ends[(best - item.key) >> shift]++] = item;
    items_.swap(dealt_);
  }

  std::vector<Item, Unfilled<Item>> items_, dealt_;
  std::vector<uint32_t> ends_;  // of the bins
  uint64_t size_ = 0;
  uint64_t most_pushed_;
  uint64_t full_ = 0;  // items at which the best are selected
  uint64_t limit_ = 0;
  uint64_t floor_ = 0;
};

}  // namespace flashtrie
