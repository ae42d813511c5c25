// An allocator of arrays that are not filled before they are written.
#pragma once
#include <memory>
#include <new>

namespace flashtrie {

// The threads that write such an array are those that get its memory, and what is never written costs nothing.
template <typename T>
struct Unfilled : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = Unfilled<U>;
  };
  template <typename U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;
  }
};
}  // namespace flashtrie
