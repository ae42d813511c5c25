#include "bindings.hpp"
#include "host/query.hpp"

namespace flashtrie {
namespace {

Sequences sequences_of(const Array<uint32_t>& tokens, const Array<int64_t>& offsets) {
  Sequences s{tokens.data(), offsets.data(), offsets.size() == 0 ? 0 : offsets.size() - 1};
  for (uint64_t i = 0; i < s.count; ++i)
    if (s.offsets[i] < 0 || s.offsets[i + 1] < s.offsets[i] || static_cast<uint64_t>(s.offsets[i + 1]) > tokens.size())
      throw std::invalid_argument("offsets do not ascend within the tokens");
  return s;
}

nb::tuple key_list(KeyList&& keys) {
  return nb::make_tuple(to_numpy(std::move(keys.key_ids)), to_numpy(std::move(keys.tokens)),
                        to_numpy(std::move(keys.offsets)));
}

// A walk that keeps its trie alive.
struct PyKeyWalk {
  nb::object owner;
  KeyWalk walk;
};

}  // namespace

void bind_query(nb::module_& m) {
  m.def(
      "find_nodes",
      [](const PyTrie& trie, Array<uint32_t> tokens, Array<int64_t> offsets, int num_threads) {
        const Sequences sequences = sequences_of(tokens, offsets);
        std::vector<uint32_t> nodes(sequences.count);
        {
          nb::gil_scoped_release release;
          find_nodes(trie.trie, sequences, nodes.data(), num_threads);
        }
        return to_numpy(std::move(nodes));
      },
      nb::arg("trie"), nb::arg("tokens"), nb::arg("offsets"), nb::arg("num_threads"));
  m.def(
      "find_key_ids",
      [](const PyTrie& trie, Array<uint32_t> tokens, Array<int64_t> offsets, int num_threads) {
        const Sequences sequences = sequences_of(tokens, offsets);
        std::vector<uint32_t> nodes(sequences.count);
        std::vector<int64_t> key_ids(sequences.count);
        {
          nb::gil_scoped_release release;
          find_nodes(trie.trie, sequences, nodes.data(), num_threads);
          find_key_ids(trie.trie, nodes.data(), nodes.size(), key_ids.data());
        }
        return to_numpy(std::move(key_ids));
      },
      nb::arg("trie"), nb::arg("tokens"), nb::arg("offsets"), nb::arg("num_threads"));
  m.def(
      "common_prefixes",
      [](const PyTrie& trie, Array<uint32_t> tokens) {
        std::vector<uint32_t> lengths, key_ids;
        common_prefixes(trie.trie, tokens.data(), tokens.size(), lengths, key_ids);
        return nb::make_tuple(to_numpy(std::move(lengths)), to_numpy(std::move(key_ids)));
      },
      nb::arg("trie"), nb::arg("tokens"));
  m.def(
      "key_tokens",
      [](const PyTrie& trie, Array<uint32_t> key_ids) {
        return key_list(key_tokens(trie.trie, key_ids.data(), key_ids.size()));
      },
      nb::arg("trie"), nb::arg("key_ids"));
  nb::class_<PyKeyWalk>(m, "KeyWalk", "The keys below a node, in lexicographic order, some at a time.")
      .def(
          "__init__",
          [](PyKeyWalk* self, nb::object trie, uint32_t node, const std::vector<uint32_t>& prefix) {
            const PyTrie& native = nb::cast<PyTrie&>(trie);
            if (node >= native.trie.view().num_nodes) throw std::out_of_range("no such node");
            new (self) PyKeyWalk{trie, KeyWalk(native.trie, node, prefix)};
          },
          nb::arg("trie"), nb::arg("node"), nb::arg("prefix"))
      .def(
          "next",
          [](PyKeyWalk& self, uint64_t limit) {
            KeyList keys;
            {
              nb::gil_scoped_release release;
              keys = self.walk.next(limit);
            }
            return key_list(std::move(keys));
          },
          nb::arg("limit"));
}

}  // namespace flashtrie
