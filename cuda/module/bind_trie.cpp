#include "bindings.hpp"

namespace flashtrie {
namespace {

TrieArrays arrays_of(const PyTrie& t, int high_width, uint64_t num_nodes) {
  TrieArrays arrays;
  arrays.louds = t.louds.data();
  arrays.louds_words = t.louds.size();
  arrays.terminal = t.terminal.data();
  arrays.terminal_words = t.terminal.size();
  arrays.label_low = t.label_low.data();
  arrays.num_labels = t.label_low.size();
  arrays.high_flags = t.high_flags.data();
  arrays.high_flag_words = t.high_flags.size();
  arrays.high_bits = t.label_high.data();
  arrays.high_words = t.label_high.size();
  arrays.high_width = high_width;
  arrays.num_nodes = num_nodes;
  return arrays;
}

// Bytes of something the trie owns, as a read-only view that keeps the trie alive.
template <typename T>
nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> bytes_view(nb::handle owner, const std::vector<T>& values) {
  return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(reinterpret_cast<const uint8_t*>(values.data()),
                                                           {values.size() * sizeof(T)}, owner);
}

void check_louds(const Array<uint64_t>& louds, uint64_t num_nodes) {
  if (num_nodes < 1 || num_nodes > kMaxNodes) throw InvalidTrie("number of nodes out of range");
  if (louds.size() < (2 * num_nodes - 1 + 63) / 64) throw InvalidTrie("louds is too short for its nodes");
}

}  // namespace

PyTrie::PyTrie(Array<uint64_t> louds_, Array<uint64_t> terminal_, Array<uint16_t> label_low_,
               Array<uint64_t> high_flags_, Array<uint64_t> label_high_, int high_width, uint64_t num_nodes,
               int num_threads)
    : louds(louds_),
      terminal(terminal_),
      label_low(label_low_),
      high_flags(high_flags_),
      label_high(label_high_),
      trie(arrays_of(*this, high_width, num_nodes), num_threads) {}

void bind_trie(nb::module_& m) {
  nb::register_exception_translator(
      [](const std::exception_ptr& error, void*) {
        try {
          std::rethrow_exception(error);
        } catch (const InvalidTrie& invalid) {
          PyErr_SetString(PyExc_ValueError, invalid.what());
        }
      });
  m.def(
      "restore_labels",
      [](Array<uint64_t> louds, uint64_t num_nodes, Array<uint16_t> label_delta, int num_threads) {
        check_louds(louds, num_nodes);
        if (label_delta.size() < num_nodes) throw InvalidTrie("label_delta is too short for its nodes");
        return to_numpy(without_gil([&] { return restore_labels(louds.data(), num_nodes, label_delta.data(), num_threads); }));
      },
      nb::arg("louds"), nb::arg("num_nodes"), nb::arg("label_delta"), nb::arg("num_threads"));
  m.def(
      "restore_terminal",
      [](Array<uint64_t> louds, uint64_t num_nodes, Array<uint64_t> inner_terminal, int num_threads) {
        check_louds(louds, num_nodes);
        return to_numpy(without_gil([&] {
          return restore_terminal(louds.data(), num_nodes, inner_terminal.data(), inner_terminal.size(), num_threads);
        }));
      },
      nb::arg("louds"), nb::arg("num_nodes"), nb::arg("inner_terminal"), nb::arg("num_threads"));
  nb::class_<PyTrie>(m, "Trie", "The resident trie: stored arrays, checked, with their directories.")
      .def(
          "__init__",
          [](PyTrie* self, Array<uint64_t> louds, Array<uint64_t> terminal, Array<uint16_t> label_low,
             Array<uint64_t> high_flags, Array<uint64_t> label_high, int high_width, uint64_t num_nodes,
             int num_threads) {
            nb::gil_scoped_release release;
            new (self) PyTrie(louds, terminal, label_low, high_flags, label_high, high_width, num_nodes, num_threads);
          },
          nb::kw_only(), nb::arg("louds"), nb::arg("terminal"), nb::arg("label_low"), nb::arg("high_flags"),
          nb::arg("label_high"), nb::arg("high_width"), nb::arg("num_nodes"), nb::arg("num_threads"))
      .def_prop_ro("num_nodes", [](const PyTrie& t) { return t.trie.view().num_nodes; })
      .def_prop_ro("num_keys", [](const PyTrie& t) { return t.trie.view().num_keys; })
      .def_prop_ro("high_width", [](const PyTrie& t) { return t.trie.view().high_width; })
      .def_prop_ro("largest_label", [](const PyTrie& t) { return t.trie.largest_label(); })
      .def_prop_ro("depth", [](const PyTrie& t) { return t.trie.depth(); })
      .def_prop_ro(
          "level_starts", [](const PyTrie& t) { return to_numpy(std::vector(t.trie.level_starts())); },
          nb::rv_policy::move)  // the array owns its memory
      .def_prop_ro("louds", [](const PyTrie& t) { return t.louds; })
      .def_prop_ro("label_low", [](const PyTrie& t) { return t.label_low; })
      .def_prop_ro("high_flags", [](const PyTrie& t) { return t.high_flags; })
      .def_prop_ro("label_high", [](const PyTrie& t) { return t.label_high; })
      .def_prop_ro("lines", [](nb::handle t) { return bytes_view(t, nb::cast<PyTrie&>(t).trie.lines()); })
      .def_prop_ro("wide", [](nb::handle t) { return bytes_view(t, nb::cast<PyTrie&>(t).trie.wide()); });
}

}  // namespace flashtrie
