// Memory in large pages, where the system has such: of a batch of mask rows and of the nodes' lists a few words here and
// there are touched, and with small pages each of them costs a read of the page table.
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

constexpr size_t kSmallPage = 4096, kHugePage = size_t(1) << 21;

// Asks for large pages where whole ones lie within memory that nobody has touched yet.
inline void ask_for_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice, so it may fail
#endif
}

// Not initialised.
class HugeWords {
 public:
  explicit HugeWords(size_t count) : size_(count) {
    const size_t wanted = count * sizeof(uint32_t);
    const size_t page = wanted >= kHugePage ? kHugePage : kSmallPage;
    const size_t bytes = (wanted / page + 1) * page;
    words_.reset(static_cast<uint32_t*>(std::aligned_alloc(page, bytes)));
    if (words_ == nullptr) throw std::bad_alloc();
    ask_for_huge_pages(words_.get(), bytes);
  }

  size_t size() const { return size_; }
  uint32_t* data() { return words_.get(); }

 private:
  struct Free {
    void operator()(uint32_t* words) const { std::free(words); }
  };
  size_t size_;
  std::unique_ptr<uint32_t[], Free> words_;
};

}  // namespace flashtrie
