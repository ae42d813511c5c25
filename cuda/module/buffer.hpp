// Memory of contiguous arrays, and addresses that Python holds as integers.
#pragma once
#include <cstdint>
#include <stdexcept>

#include "bindings.hpp"
#include "host/pinned.hpp"

namespace flashtrie {

// A contiguous array's memory, through the buffer protocol: a fifth of the time of the array interfaces.
class Buffer {
 public:
  explicit Buffer(nb::handle array, bool is_written = false) {
    if (PyObject_GetBuffer(array.ptr(), &view_, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Buffer(nb::handle array, size_t num_bytes, bool is_written = false) : Buffer(array, is_written) {
    if (size() != num_bytes) throw std::invalid_argument("an array of another size");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }

  size_t size() const { return static_cast<size_t>(view_.len); }

  template <typename T>
  T* as() const {
    return static_cast<T*>(view_.buf);
  }

 private:
  Py_buffer view_;
};

inline bool are_pinned(const Buffer& tokens, const Buffer& logprobs) {
  return pinned_ranges().contain(tokens.as<void>(), tokens.size()) &&
         pinned_ranges().contain(logprobs.as<void>(), logprobs.size());
}

template <typename T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// One of the driver's functions, looked up by whoever has the library loaded.
template <typename Function>
void set_function(Function*& function, uint64_t address) {
  function = reinterpret_cast<Function*>(static_cast<uintptr_t>(address));
}

inline void check_signals() {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace flashtrie
