// Tensors looked at through DLPack's C exchange table (DLPack 1.3), which torch's type carries: a call through a
// function pointer, where the `__dlpack__` method builds objects and takes microseconds.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

namespace flashtrie {

// DLTensor of dlpack.h.
struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

constexpr int32_t kDlCpu = 1, kDlCudaHost = 3;
constexpr uint8_t kDlInt = 0, kDlUint = 1;

namespace dlpack_detail {

// DLPackExchangeAPI of dlpack.h; only the borrowed view is used.
struct ExchangeTable {
  uint32_t major, minor;
  void* previous;
  void* allocator;
  void* from_object;
  void* to_object;
  int (*borrow)(void* object, DlTensor* out);
  void* current_stream;
};

inline const ExchangeTable* find_table(PyTypeObject* type) {
  PyObject* const capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  const void* found = capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  PyErr_Clear();
  Py_XDECREF(capsule);
  const ExchangeTable* const table = static_cast<const ExchangeTable*>(found);
  return table != nullptr && table->major == 1 ? table : nullptr;
}

}  // namespace dlpack_detail

// Fills `out` with a view that is good while `object` lives; false where its type has no such table.
inline bool borrow_tensor(PyObject* object, DlTensor* out) {
  // The last type asked for, kept alive so that its address is its own. The interpreter lock guards both.
  static PyTypeObject* known_type = nullptr;
  static const dlpack_detail::ExchangeTable* known_table = nullptr;
  PyTypeObject* const type = Py_TYPE(object);
  if (type != known_type) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    Py_XDECREF(reinterpret_cast<PyObject*>(known_type));
    known_type = type;
    known_table = dlpack_detail::find_table(type);
  }
  if (known_table == nullptr || known_table->borrow == nullptr) return false;
  if (known_table->borrow(object, out) == 0) return true;
  PyErr_Clear();
  return false;
}

}  // namespace flashtrie
