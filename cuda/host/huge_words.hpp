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

// Not initialised. Mapped for itself: what the heap hands out may have been in use before, in small pages, and stays so.
class HugeWords {
 public:
  explicit HugeWords(size_t count) : size_(count) {
    const size_t wanted = count * sizeof(uint32_t), page = wanted >= kHugePage ? kHugePage : kSmallPage;
    const size_t bytes = (wanted / page + 1) * page;
#if defined(__linux__)
    const size_t mapped = bytes + page;  // so that whole pages lie within
    void* const base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(base) + page - 1) / page * page;
    words_ = Owner(reinterpret_cast<uint32_t*>(begin), Unmap{base, mapped});
#else
    words_.reset(static_cast<uint32_t*>(std::aligned_alloc(page, bytes)));
    if (words_ == nullptr) throw std::bad_alloc();
#endif
    ask_for_huge_pages(words_.get(), bytes);
  }

  size_t size() const { return size_; }
  uint32_t* data() { return words_.get(); }

 private:
#if defined(__linux__)
  struct Unmap {
    void* base;
    size_t bytes;
    void operator()(uint32_t*) const { munmap(base, bytes); }
  };
  using Owner = std::unique_ptr<uint32_t[], Unmap>;
  Owner words_{nullptr, Unmap{nullptr, 0}};
#else
  struct Free {
    void operator()(uint32_t* words) const { std::free(words); }
  };
  std::unique_ptr<uint32_t[], Free> words_;
#endif
  size_t size_;
};

}  // namespace flashtrie
