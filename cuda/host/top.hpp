// Keeps the best `limit` items of a stream by their 64-bit rank key, with a floor that rises as they come.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace flashtrie {

// Item has a member `uint64_t key`, larger is better; keys are distinct.
template <typename Item>
class Top {
 public:
  void reset(uint64_t limit) {
    limit_ = limit;
    items_.resize(std::max<uint64_t>(2 * limit, 256));
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

  void sort() {
    std::sort(items_.begin(), items_.begin() + static_cast<int64_t>(size_),
              [](const Item& a, const Item& b) { return a.key > b.key; });
  }

  std::span<const Item> items() const { return {items_.data(), size_}; }

 private:
  std::vector<Item> items_;
  uint64_t size_ = 0;
  uint64_t limit_ = 0;
  uint64_t floor_ = 0;
};

}  // namespace flashtrie
