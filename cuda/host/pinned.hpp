// Which host memory the GPU reaches by itself, and need not be copied for it.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>

namespace flashtrie {

class PinnedRanges {
 public:
  void add(uintptr_t begin, uintptr_t end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_[begin] = end;
  }

  void remove(uintptr_t begin) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_.erase(begin);
  }

  bool contain(const void* from, size_t num_bytes) const {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(from);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto behind = ends_.upper_bound(begin);
    return behind != ends_.begin() && begin + num_bytes <= (--behind)->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uintptr_t, uintptr_t> ends_;
};

// Of this process.
inline PinnedRanges& pinned_ranges() {
  static PinnedRanges ranges;
  return ranges;
}

}  // namespace flashtrie
