#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "bindings.hpp"
#include "bitmask.hpp"
#include "host/mask_rows.hpp"
#include "host/masks_compile.hpp"
#include "host/masks_plain.hpp"
#include "host/vocabulary_automaton.hpp"
#include "new_array.hpp"

namespace flashtrie {
namespace {

constexpr uint32_t kMaxVocabSize = 1u << 24;

nb::tuple build_automaton_arrays(Array<uint32_t> tokens, Array<uint64_t> begins, Array<uint8_t> bytes) {
  if (begins.size() != tokens.size() + 1 || begins.data()[tokens.size()] > bytes.size())
    throw std::invalid_argument("one more begin than tokens is needed, within the bytes");
  for (size_t i = 0; i < tokens.size(); ++i)
    if (begins.data()[i] > begins.data()[i + 1]) throw std::invalid_argument("begins that do not ascend");
  VocabularyAutomaton made;
  {
    nb::gil_scoped_release release;
    made = build_automaton(tokens.data(), begins.data(), bytes.data(), tokens.size());
  }
  const auto flat = [](const auto& records) {
    std::vector<uint32_t> words(records.size() * sizeof(records[0]) / sizeof(uint32_t));
    if (!words.empty()) memcpy(words.data(), records.data(), words.size() * sizeof(uint32_t));
    return to_numpy(std::move(words));
  };
  return nb::make_tuple(flat(made.slots), flat(made.outputs));
}

AutomatonView automaton_view(const Array<uint32_t>& slots, const Array<uint32_t>& outputs) {
  constexpr size_t kSlotWords = sizeof(AutomatonSlot) / sizeof(uint32_t), kOutputWords = sizeof(Output) / sizeof(uint32_t);
  if (slots.size() == 0 || slots.size() % (256 * kSlotWords) != 0 || outputs.size() % kOutputWords != 0)
    throw std::invalid_argument("not the arrays of an automaton");
  return {reinterpret_cast<const AutomatonSlot*>(slots.data()), reinterpret_cast<const Output*>(outputs.data()),
          slots.size() / kSlotWords, outputs.size() / kOutputWords};
}

// The members' bytes, one after the other: whoever compiles them reads them several times, in any order, and Python's
// strings lie all over the memory.
struct Members {
  std::vector<std::string_view> views;
  std::vector<char> bytes;
};

std::string_view bytes_of(PyObject* member, size_t at) {
  Py_ssize_t size = 0;
  if (PyUnicode_Check(member)) {
    const char* text = PyUnicode_AsUTF8AndSize(member, &size);
    if (text != nullptr) return {text, static_cast<size_t>(size)};
    PyErr_Clear();
    throw nb::value_error(("member " + std::to_string(at) + " has no UTF-8 form (a lone surrogate)").c_str());
  }
  if (PyBytes_Check(member)) return {PyBytes_AS_STRING(member), static_cast<size_t>(PyBytes_GET_SIZE(member))};
  throw nb::type_error(("member " + std::to_string(at) + " is neither str nor bytes").c_str());
}

Members members_of(nb::handle strings, const Spelling& spelling) {
  constexpr size_t kPrefetchDistance = 8, kCacheLine = 64;
  const nb::object sequence = nb::steal(PySequence_Fast(strings.ptr(), "members are no sequence"));
  if (!sequence.is_valid()) throw nb::python_error();
  const size_t count = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
  PyObject** const items = PySequence_Fast_ITEMS(sequence.ptr());
  Members members;
  std::vector<size_t> begins;
  begins.reserve(count + 1);
  for (size_t i = 0; i < count; ++i) {
    if (i + kPrefetchDistance < count) {
      const char* const ahead = reinterpret_cast<const char*>(items[i + kPrefetchDistance]);
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + kCacheLine);
    }
    begins.push_back(members.bytes.size());
    append_spelled(bytes_of(items[i], i), spelling, members.bytes);
  }
  begins.push_back(members.bytes.size());
  members.views.reserve(count);
  for (size_t i = 0; i < count; ++i)
    members.views.emplace_back(members.bytes.data() + begins[i], begins[i + 1] - begins[i]);
  return members;
}

template <typename T>
NumpyArray<T> backward_to_numpy(BackwardArray<T>& array) {
  const size_t size = array.size();
  T* const begin = array.begin();
  T* const block = array.release().release();
  nb::capsule owner(block, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return NumpyArray<T>(begin, {size}, owner);
}

nb::tuple compile_arrays(Array<uint32_t> slots, Array<uint32_t> outputs, uint32_t vocab_size, nb::object strings,
                         bool json_quoted, bool prefix_space) {
  if (vocab_size == 0 || vocab_size > kMaxVocabSize) throw std::invalid_argument("vocabulary sizes run from 1 to 2^24");
  const AutomatonView automaton = automaton_view(slots, outputs);
  Members members = members_of(strings, {json_quoted, prefix_space});
  CompiledMasks made;
  CompileStatus status;
  {
    nb::gil_scoped_release release;
    status = compile_masks(automaton, vocab_size, members.views, made);
  }
  if (status == CompileStatus::too_many_nodes) throw std::overflow_error("more than 2^31 - 2 nodes");
  if (status == CompileStatus::too_many_entries) throw std::overflow_error("more than 2^30 - 1 allowed tokens in all");
  return nb::make_tuple(backward_to_numpy(made.rows), backward_to_numpy(made.entries),
                        to_numpy(std::move(made.far_entries)), to_numpy(std::move(made.far_targets)), made.num_members);
}

// Opened masks as Python holds them: the arrays stay alive with it.
struct PyMasks {
  Array<uint16_t> rows;
  Array<uint32_t> entries, far_entries, far_targets, byte_begins, byte_tokens, eos;
  std::optional<MaskSet> set;

  PyMasks(Array<uint16_t> rows_, Array<uint32_t> entries_, Array<uint32_t> far_entries_, Array<uint32_t> far_targets_,
          Array<uint32_t> byte_begins_, Array<uint32_t> byte_tokens_, Array<uint32_t> eos_, uint32_t vocab_size, bool check)
      : rows(rows_), entries(entries_), far_entries(far_entries_), far_targets(far_targets_),
        byte_begins(byte_begins_), byte_tokens(byte_tokens_), eos(eos_) {
    const uint64_t num_rows = rows.size() / kRowHalves, num_nodes = num_rows - 2;
    if (rows.size() % kRowHalves != 0 || num_rows < 3 || num_nodes > kMaxMaskNodes || far_entries.size() != far_targets.size() ||
        vocab_size > kMaxVocabSize || byte_begins.size() != 257 || byte_begins.data()[256] != byte_tokens.size())
      throw std::invalid_argument("arrays of different sizes");
    const MaskView view{rows.data(), entries.data(), far_entries.data(), far_targets.data(), eos.data(),
                        {byte_begins.data(), byte_tokens.data()},
                        static_cast<uint32_t>(num_nodes), static_cast<uint32_t>(far_entries.size()),
                        static_cast<uint32_t>(eos.size()), vocab_size, hop_bits_for(vocab_size)};
    if (check)
      if (const char* flaw = find_mask_flaw(view, num_rows, entries.size())) throw std::invalid_argument(flaw);
    set.emplace(view);
  }
};

// The same lists with an entry for every token, for kernels: (rows, entries, far_entries, far_targets).
nb::tuple plain_arrays(const PyMasks& masks) {
  PlainMasks made;
  bool fits;
  {
    nb::gil_scoped_release release;
    fits = make_plain(masks.set->view(), made);
  }
  if (!fits) throw std::overflow_error("more than 2^30 - 1 allowed tokens in all");
  return nb::make_tuple(to_numpy(std::move(made.rows)), to_numpy(std::move(made.entries)),
                        to_numpy(std::move(made.far_entries)), to_numpy(std::move(made.far_targets)));
}

void check_states(const MaskSet& set, const uint32_t* states, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) largest = std::max(largest, states[i]);
  if (largest > set.ended()) throw nb::value_error("a state outside the trie");
}

// One generation: the state and the ones before it.
struct Matcher {
  const PyMasks* masks;  // kept alive by the Python object
  uint32_t state = 0;
  std::vector<uint32_t> history;

  bool advance(int64_t token) {
    const MaskView& view = masks->set->view();
    if (token < 0 || token >= view.vocab_size) return false;
    const uint32_t next = flashtrie::advance(view, state, static_cast<uint32_t>(token));
    if (next == kRejected) return false;
    history.push_back(state);
    state = next;
    return true;
  }

  void rollback(int64_t count) {
    if (count < 0 || static_cast<uint64_t>(count) > history.size())
      throw nb::value_error("cannot take back more tokens than were accepted");
    if (count == 0) return;
    state = history[history.size() - count];
    history.resize(history.size() - count);
  }
};

// Bytes that must follow, and tokens that spell as many of them as tokens can: at each place the longest
// that ends within them.
nb::tuple forced_from(const PyMasks& masks, uint32_t state) {
  std::vector<char> bytes;
  uint32_t end = state;
  const MaskView& view = masks.set->view();
  for (EntryRange range = entry_range(view, end); range.single; range = entry_range(view, ++end))
    bytes.push_back(static_cast<char>(range.byte));
  nb::list tokens;
  for (uint32_t at = state; at < end;) {
    const EntryRange range = entry_range(view, at);
    const ByteRange byte = byte_range(view, range);
    uint32_t furthest = at, best = 0;
    if (byte.count() > 0) {
      furthest = at + 1;
      best = view.bytes.tokens[byte.first];
    }
    for (uint32_t entry = range.first; entry < range.last; ++entry) {
      const uint32_t target = entry_target(view, at, entry);
      if (target > furthest && target <= end) {
        furthest = target;
        best = entry_token(view, entry);
      }
    }
    if (furthest == at) break;
    tokens.append(best);
    at = furthest;
  }
  return nb::make_tuple(nb::bytes(bytes.data(), bytes.size()), tokens);
}

NumpyArray<uint32_t> allowed_of(const PyMasks& masks, uint32_t state) {
  check_states(*masks.set, &state, 1);
  std::vector<uint32_t> tokens;
  masks.set->append_allowed(state, tokens);
  return to_numpy(std::move(tokens));
}

// For each state its allowed ids, one after the other: (ids, offsets).
nb::tuple allowed_lists(const PyMasks& masks, States states) {
  check_states(*masks.set, states.data(), states.size());
  std::vector<uint32_t> tokens;
  std::vector<int64_t> offsets{0};
  for (size_t i = 0; i < states.size(); ++i) {
    masks.set->append_allowed(states.data()[i], tokens);
    offsets.push_back(static_cast<int64_t>(tokens.size()));
  }
  return nb::make_tuple(to_numpy(std::move(tokens)), to_numpy(std::move(offsets)));
}

void fill_rows(const PyMasks& masks, States states, nb::handle array) {
  const Bitmask bitmask(array);
  const MaskSet& set = *masks.set;
  check_states(set, states.data(), states.size());
  if (states.size() > bitmask.num_rows()) throw nb::value_error("more states than rows in the bitmask");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < states.size(); ++i) set.fill(states.data()[i], bitmask.row(i, set.num_words()));
}

nb::object advance_states(const PyMasks& masks, States states, Array<int64_t> tokens) {
  check_states(*masks.set, states.data(), states.size());
  if (tokens.size() != states.size()) throw nb::value_error("one token for each state is needed");
  NewArray<bool> allowed(states.size());
  {
    nb::gil_scoped_release release;
    masks.set->advance_each(states.data(), tokens.data(), allowed.data(), states.size());
  }
  return allowed.take();
}

NumpyArray<uint32_t> walk_rows(const PyMasks& masks, TokenRows tokens) {
  std::vector<uint32_t> states(tokens.shape(0));
  {
    nb::gil_scoped_release release;
    masks.set->walk_each(tokens.data(), tokens.shape(0), tokens.shape(1), tokens.shape(1), states.data());
  }
  return to_numpy(std::move(states));
}

struct PyMaskRows {
  const PyMasks* masks;  // kept alive by the Python object
  MaskRows rows;
};

void check_shown(const PyMaskRows& self, const States& states) {
  check_states(*self.masks->set, states.data(), states.size());
  if (states.size() > self.rows.num_rows()) throw nb::value_error("more states than rows");
}

// The rows of a batch, or with those behind them, as a view that keeps them alive.
nb::ndarray<nb::numpy, int32_t, nb::ndim<2>> words_of(nb::handle self, bool with_behind) {
  PyMaskRows& made = nb::cast<PyMaskRows&>(self);
  const size_t num_rows = made.rows.num_rows() + (with_behind ? made.rows.num_behind() : 0);
  const size_t shape[2] = {num_rows, made.masks->set->num_words()};
  return nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>(made.rows.words(), 2, shape, self);
}

void bind_matcher(nb::module_& m) {
  nb::class_<Matcher>(m, "Matcher")
      .def_ro("state", &Matcher::state)
      .def_prop_ro("is_terminated", [](const Matcher& self) { return self.state == self.masks->set->ended(); })
      .def_prop_ro("is_terminal",
                   [](const Matcher& self) { return entry_range(self.masks->set->view(), self.state).terminal; })
      .def_prop_ro("num_accepted", [](const Matcher& self) { return self.history.size(); })
      .def("advance", &Matcher::advance, nb::arg("token"))
      .def("rollback", &Matcher::rollback, nb::arg("count") = 1)
      .def("reset",
           [](Matcher& self) {
             self.state = 0;
             self.history.clear();
           })
      .def("fork", [](const Matcher& self) { return Matcher(self); }, nb::keep_alive<0, 1>())
      .def("allowed", [](const Matcher& self) { return allowed_of(*self.masks, self.state); })
      .def("forced", [](const Matcher& self) { return forced_from(*self.masks, self.state); })
      .def(
          "fill",
          [](const Matcher& self, nb::handle array, size_t index) {
            const Bitmask bitmask(array);
            const MaskSet& set = *self.masks->set;
            set.fill(self.state, bitmask.row(index, set.num_words()));
          },
          nb::arg("bitmask"), nb::arg("index") = 0);
}

void bind_mask_rows(nb::module_& m) {
  nb::class_<PyMaskRows>(m, "MaskRows")
      .def("fill",
           [](PyMaskRows& self, States states) {
             check_shown(self, states);
             nb::gil_scoped_release release;
             self.rows.fill(states.data(), states.size());
           })
      .def("share",
           [](PyMaskRows& self, States states) {
             check_shown(self, states);
             NewArray<int32_t> at(states.size());
             {
               nb::gil_scoped_release release;
               self.rows.share(states.data(), states.size(), at.data());
             }
             return at.take();
           })
      .def("forget", [](PyMaskRows& self) { self.rows.forget(); })
      .def_prop_ro("words", [](nb::handle self) { return words_of(self, false); })
      .def_prop_ro("table", [](nb::handle self) { return words_of(self, true); });
}

}  // namespace

const MaskView& mask_view(nb::handle masks) { return nb::cast<const PyMasks&>(masks).set->view(); }

void bind_masks(nb::module_& m) {
  m.def("build_automaton", &build_automaton_arrays, nb::arg("tokens"), nb::arg("begins"), nb::arg("bytes"));
  m.def("compile_masks", &compile_arrays, nb::arg("slots"), nb::arg("outputs"), nb::arg("vocab_size"),
        nb::arg("members"), nb::arg("json_quoted"), nb::arg("prefix_space"));
  nb::class_<PyMasks>(m, "MaskSet")
      .def(nb::init<Array<uint16_t>, Array<uint32_t>, Array<uint32_t>, Array<uint32_t>, Array<uint32_t>, Array<uint32_t>,
                    Array<uint32_t>, uint32_t, bool>(),
           nb::arg("rows"), nb::arg("entries"), nb::arg("far_entries"), nb::arg("far_targets"), nb::arg("byte_begins"), nb::arg("byte_tokens"), nb::arg("eos"), nb::arg("vocab_size"), nb::arg("check"))
      .def_prop_ro("num_words", [](const PyMasks& self) { return self.set->num_words(); })
      .def_prop_ro("hop_bits", [](const PyMasks& self) { return self.set->view().hop_bits; })
      .def_prop_ro(
          "dense_nodes", [](const PyMasks& self) { return to_numpy(std::vector<uint32_t>(self.set->dense_nodes())); },
          nb::rv_policy::automatic)
      .def_prop_ro(
          "dense_words", [](const PyMasks& self) { return to_numpy(std::vector<uint32_t>(self.set->dense_words())); },
          nb::rv_policy::automatic)
      .def_prop_ro("dense_bytes", [](const PyMasks& self) { return self.set->dense_words().size() * sizeof(uint32_t); })
      .def_prop_ro("num_allowed", [](const PyMasks& self) { return count_allowed_pairs(self.set->view()); })
      .def("plain", &plain_arrays)
      .def("matcher", [](const PyMasks& self) { return Matcher{&self, 0, {}}; }, nb::keep_alive<0, 1>())
      .def("mask_rows", [](const PyMasks& self, size_t count) { return PyMaskRows{&self, MaskRows(*self.set, count)}; },
           nb::arg("num_rows"), nb::keep_alive<0, 1>())
      .def("allowed", &allowed_of, nb::arg("state"))
      .def("allowed_lists", &allowed_lists, nb::arg("states"))
      .def("forced", [](const PyMasks& self, uint32_t state) {
             check_states(*self.set, &state, 1);
             return forced_from(self, state);
           }, nb::arg("state"))
      .def("fill", &fill_rows, nb::arg("states"), nb::arg("bitmask"))
      .def("advance", &advance_states, nb::arg("states"), nb::arg("tokens"))
      .def("walk", &walk_rows, nb::arg("tokens"));
  bind_matcher(m);
  bind_mask_rows(m);
}

}  // namespace flashtrie
