// Keeps the best `limit` items of a stream by their 64-bit rank key, with a floor that rises as they come.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace flashtrie {

// Item has a member `uint64_t key`, larger is better; keys are distinct.
template <typename Item>
class Top {
 public:
  void reset(uint64_t limit) {
    limit_ = limit;
    capacity_ = std::max<uint64_t>(2 * limit, 256);
    items_.clear();
    floor_ = 0;
  }

  // False for what cannot be among the best any more; spares the caller the work of making it.
  bool admits(uint64_t key) const { return key > floor_; }

  void push(const Item& item) {
    items_.push_back(item);
    if (items_.size() >= capacity_) select();
  }

  // Leaves exactly the best `limit` (or all, if fewer), in no order.
  void select() {
    if (items_.size() <= limit_) return;
    auto better = [](const Item& a, const Item& b) { return a.key > b.key; };
    std::nth_element(items_.begin(), items_.begin() + static_cast<int64_t>(limit_ - 1), items_.end(), better);
    items_.resize(limit_);
    floor_ = items_.back().key;
  }

  void sort() {
    std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.key > b.key; });
  }

  std::vector<Item>& items() { return items_; }

 private:
  std::vector<Item> items_;
  uint64_t limit_ = 0;
  uint64_t capacity_ = 0;
  uint64_t floor_ = 0;
};

}  // namespace flashtrie
