// Words in large pages, where the system has such: a batch of mask rows is touched at a few words a row, and with
// small pages each of them costs a read of the page table.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace flashtrie {

// Not initialised.
class HugeWords {
 public:
  explicit HugeWords(size_t count) : size_(count) {
    const size_t wanted = count * sizeof(uint32_t);
    const size_t page = wanted >= kHugePage ? kHugePage : kPage;
    const size_t bytes = (wanted / page + 1) * page;
    words_.reset(static_cast<uint32_t*>(std::aligned_alloc(page, bytes)));
    if (words_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (page == kHugePage) madvise(words_.get(), bytes, MADV_HUGEPAGE);  // advice, so it may fail
#endif
  }

  size_t size() const { return size_; }
  uint32_t* data() { return words_.get(); }

 private:
  static constexpr size_t kPage = 4096, kHugePage = size_t(1) << 21;
  struct Free {
    void operator()(uint32_t* words) const { std::free(words); }
  };
  size_t size_;
  std::unique_ptr<uint32_t[], Free> words_;
};

}  // namespace flashtrie
