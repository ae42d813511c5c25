// Bitmasks and states that callers hand in.
#pragma once
#include <cstring>
#include <string_view>

#include "bindings.hpp"
#include "dlpack_exchange.hpp"

namespace flashtrie {

// A writable C-contiguous int32 matrix or vector of the caller's: numpy by the buffer protocol, torch by DLPack's
// table of C functions, anything else by `__dlpack__`.
class Bitmask {
 public:
  explicit Bitmask(nb::handle array) {
    if (PyObject_CheckBuffer(array.ptr())) {
      if (PyObject_GetBuffer(array.ptr(), &buffer_, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0)
        throw nb::python_error();
      held_ = true;
      const std::string_view format = buffer_.format == nullptr ? "B" : buffer_.format;
      if (buffer_.itemsize != 4 || (format != "i" && format != "I" && format != "l" && format != "L"))
        refuse();
      set_shape(buffer_.buf, buffer_.ndim, [this](int axis) { return buffer_.shape[axis]; });
      return;
    }
    if (borrow(array.ptr())) return;
    try {
      tensor_ = nb::cast<nb::ndarray<int32_t, nb::c_contig, nb::device::cpu>>(array, false);
    } catch (const nb::cast_error&) {
      refuse();
    }
    set_shape(tensor_.data(), static_cast<int>(tensor_.ndim()), [this](int axis) { return tensor_.shape(axis); });
  }
  ~Bitmask() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  Bitmask(const Bitmask&) = delete;
  Bitmask& operator=(const Bitmask&) = delete;

  size_t num_rows() const { return num_rows_; }

  // A row of at least num_words words; what it has beyond them is cleared.
  uint32_t* row(size_t index, size_t num_words) const {
    if (index >= num_rows_) throw nb::index_error("the bitmask has no such row");
    if (width_ < num_words) throw nb::value_error("the bitmask's rows are shorter than the vocabulary");
    uint32_t* const words = data_ + index * width_;
    if (width_ > num_words) memset(words + num_words, 0, (width_ - num_words) * sizeof(uint32_t));
    return words;
  }

 private:
  bool borrow(PyObject* array) {
    DlTensor tensor;
    if (!borrow_tensor(array, &tensor)) return false;
    const bool is_host = tensor.device_type == kDlCpu || tensor.device_type == kDlCudaHost;
    const bool is_int32 = (tensor.code == kDlInt || tensor.code == kDlUint) && tensor.bits == 32 && tensor.lanes == 1;
    if (!is_host || !is_int32 || !is_contiguous(tensor)) refuse();
    set_shape(static_cast<char*>(tensor.data) + tensor.byte_offset, tensor.ndim,
              [&tensor](int axis) { return tensor.shape[axis]; });
    return true;
  }

  static bool is_contiguous(const DlTensor& tensor) {
    int64_t step = 1;
    for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
      if (tensor.strides != nullptr && tensor.shape[axis] > 1 && tensor.strides[axis] != step) return false;
      step *= tensor.shape[axis];
    }
    return true;
  }

  [[noreturn]] void refuse() {
    if (held_) PyBuffer_Release(&buffer_);
    held_ = false;
    throw nb::type_error("a bitmask is a writable C-contiguous int32 array [words] or [rows, words] in CPU memory");
  }

  template <typename Shape>
  void set_shape(void* data, int ndim, const Shape& shape) {
    if (ndim != 1 && ndim != 2) refuse();
    data_ = static_cast<uint32_t*>(data);
    num_rows_ = ndim == 2 ? static_cast<size_t>(shape(0)) : 1;
    width_ = static_cast<size_t>(shape(ndim - 1));
  }

  Py_buffer buffer_;
  bool held_ = false;
  nb::ndarray<int32_t, nb::c_contig, nb::device::cpu> tensor_;
  uint32_t* data_ = nullptr;
  size_t num_rows_ = 0, width_ = 0;
};

using States = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TokenRows = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

}  // namespace flashtrie
