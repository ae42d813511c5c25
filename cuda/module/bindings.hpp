// What the binding files share.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "flashtrie/masks.cuh"
#include "host/trie.hpp"

namespace flashtrie {
namespace nb = nanobind;

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
using NumpyArray = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

// A numpy array that owns what `values` held.
template <typename T, typename Allocator>
NumpyArray<T> to_numpy(std::vector<T, Allocator>&& values) {
  using Values = std::vector<T, Allocator>;
  auto* kept = new Values(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Values*>(p); });
  return NumpyArray<T>(kept->data(), {kept->size()}, owner);
}

// Runs `work` with the interpreter free for other threads.
template <typename Work>
auto without_gil(const Work& work) {
  nb::gil_scoped_release release;
  return work();
}

// The native trie as Python holds it: the stored arrays stay alive with it.
struct PyTrie {
  PyTrie(Array<uint64_t> louds, Array<uint64_t> terminal, Array<uint16_t> label_low, Array<uint64_t> high_flags,
         Array<uint64_t> label_high, int high_width, uint64_t num_nodes, int num_threads);

  Array<uint64_t> louds, terminal;
  Array<uint16_t> label_low;
  Array<uint64_t> high_flags, label_high;
  Trie trie;
};

// The view of a MaskSet object; a type error for anything else.
const MaskView& mask_view(nb::handle masks);

void bind_trie(nb::module_& m);
void bind_tails(nb::module_& m);
void bind_build(nb::module_& m);
void bind_query(nb::module_& m);
void bind_search(nb::module_& m);
void bind_gpu_query(nb::module_& m);
void bind_gpu_batch(nb::module_& m);
void bind_baselines(nb::module_& m);
void bind_parse(nb::module_& m);
void bind_draft(nb::module_& m);
void bind_masks(nb::module_& m);
void bind_trie_steps(nb::module_& m);

}  // namespace flashtrie
