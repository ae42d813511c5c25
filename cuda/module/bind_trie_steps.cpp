#include "bindings.hpp"
#include "bitmask.hpp"
#include "host/trie_steps.hpp"
#include "new_array.hpp"

namespace flashtrie {
namespace {

// Steps over a trie that Python keeps alive beside them.
struct PyTrieSteps {
  TrieSteps steps;
};

void check_states(const TrieSteps& steps, const States& states) {
  for (size_t i = 0; i < states.size(); ++i)
    if (states.data()[i] > steps.ended()) throw nb::value_error("a state outside the trie");
}

nb::tuple children_of(const PyTrieSteps& self, States nodes) {
  check_states(self.steps, nodes);
  std::vector<uint32_t> tokens, children;
  std::vector<int64_t> offsets{0};
  for (size_t i = 0; i < nodes.size(); ++i) {
    self.steps.append_children(nodes.data()[i], tokens, children);
    offsets.push_back(static_cast<int64_t>(tokens.size()));
  }
  return nb::make_tuple(to_numpy(std::move(tokens)), to_numpy(std::move(children)), to_numpy(std::move(offsets)));
}

nb::tuple allowed_lists_of(const PyTrieSteps& self, States states) {
  check_states(self.steps, states);
  std::vector<uint32_t> tokens;
  std::vector<int64_t> offsets{0};
  for (size_t i = 0; i < states.size(); ++i) {
    self.steps.append_allowed(states.data()[i], tokens);
    offsets.push_back(static_cast<int64_t>(tokens.size()));
  }
  return nb::make_tuple(to_numpy(std::move(tokens)), to_numpy(std::move(offsets)));
}

void fill_rows(const PyTrieSteps& self, States states, nb::handle array) {
  const Bitmask bitmask(array);
  check_states(self.steps, states);
  if (states.size() > bitmask.num_rows()) throw nb::value_error("more states than rows in the bitmask");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < states.size(); ++i) self.steps.fill(states.data()[i], bitmask.row(i, self.steps.num_words()));
}

nb::object advance_states(const PyTrieSteps& self, States states, Array<int64_t> tokens) {
  check_states(self.steps, states);
  if (tokens.size() != states.size()) throw nb::value_error("one token for each state is needed");
  NewArray<bool> allowed(states.size());
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < states.size(); ++i) {
      const uint32_t next = self.steps.advance(states.data()[i], tokens.data()[i]);
      allowed.data()[i] = next != kNoNode;
      if (next != kNoNode) states.data()[i] = next;
    }
  }
  return allowed.take();
}

NumpyArray<uint32_t> walk_rows(const PyTrieSteps& self, TokenRows tokens) {
  std::vector<uint32_t> states(tokens.shape(0), 0);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < states.size(); ++i)
      for (size_t at = 0; at < tokens.shape(1) && states[i] < self.steps.ended(); ++at)
        states[i] = self.steps.advance(states[i], tokens.data()[i * tokens.shape(1) + at]);
  }
  return to_numpy(std::move(states));
}

}  // namespace

void bind_trie_steps(nb::module_& m) {
  nb::class_<PyTrieSteps>(m, "TrieSteps")
      .def(
          "__init__",
          [](PyTrieSteps* self, const PyTrie& trie, Array<uint32_t> eos, uint32_t vocab_size) {
            const std::vector<uint32_t> ids(eos.data(), eos.data() + eos.size());
            for (size_t i = 0; i < ids.size(); ++i)
              if (ids[i] >= vocab_size || (i > 0 && ids[i] <= ids[i - 1]))
                throw std::invalid_argument("end-of-sequence ids ascend within the vocabulary");
            if (trie.trie.largest_label() >= vocab_size && trie.trie.view().num_nodes > 1)
              throw std::invalid_argument("the trie holds tokens outside the vocabulary");
            new (self) PyTrieSteps{TrieSteps(trie.trie, ids, vocab_size)};
          },
          nb::arg("trie"), nb::arg("eos"), nb::arg("vocab_size"), nb::keep_alive<1, 2>())
      .def_prop_ro("num_words", [](const PyTrieSteps& self) { return self.steps.num_words(); })
      .def("children", &children_of, nb::arg("nodes"))
      .def("allowed_lists", &allowed_lists_of, nb::arg("states"))
      .def("fill", &fill_rows, nb::arg("states"), nb::arg("bitmask"))
      .def("advance", &advance_states, nb::arg("states"), nb::arg("tokens"))
      .def("walk", &walk_rows, nb::arg("tokens"));
}

}  // namespace flashtrie
