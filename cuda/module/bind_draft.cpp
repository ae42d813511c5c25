#include <optional>
#include <stdexcept>

#include "bindings.hpp"
#include "host/draft.hpp"

namespace flashtrie {
namespace {

using RawArray = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void need(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void check_sizes(const DraftSizes& sizes) {
  need(sizes.batch_size >= 0 && sizes.block_size >= 2 && sizes.vocab_size >= 1 && sizes.num_nodes >= 1, "sizes");
  need(sizes.top_k >= 1 && sizes.top_k <= sizes.vocab_size, "top_k");
  need(sizes.first_row == 0 || sizes.first_row == 1, "first_row");
  need(sizes.logit_type >= kFloat32 && sizes.logit_type <= kBfloat16, "logit_type");
}

// The array `name` of the outputs, which must hold `count` values of type T.
template <typename T>
T* output(const nb::dict& outputs, const char* name, int64_t count) {
  using Output = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  if (!outputs.contains(name)) throw std::invalid_argument(std::string("no output ") + name);
  const Output array = nb::cast<Output>(outputs[name], false);
  if (array.size() != static_cast<size_t>(count)) throw std::invalid_argument(std::string("size of output ") + name);
  return array.data();
}

DraftOutputs outputs_of(const DraftSizes& sizes, const nb::dict& arrays) {
  const int64_t batch = sizes.batch_size, nodes = batch * sizes.num_nodes;
  DraftOutputs out{};
  out.node_token_ids = output<int32_t>(arrays, "node_token_ids", nodes);
  out.node_depths = output<int32_t>(arrays, "node_depths", nodes);
  out.parent_ids = output<int32_t>(arrays, "parent_ids", nodes);
  out.node_scores = output<float>(arrays, "node_scores", nodes);
  out.valid_counts = output<int32_t>(arrays, "valid_counts", batch);
  out.verify_token_ids = output<int32_t>(arrays, "verify_token_ids", nodes);
  out.verify_position_ids = output<int32_t>(arrays, "verify_position_ids", nodes);
  out.packed_ancestor_mask = output<int32_t>(arrays, "packed_ancestor_mask", nodes * sizes.mask_words());
  out.ancestor_mask = output<int8_t>(arrays, "ancestor_mask", nodes * sizes.num_nodes);
  out.context_lengths = output<int32_t>(arrays, "context_lengths", batch);
  out.select_token_indices = output<int64_t>(arrays, "select_token_indices", nodes);
  out.status = output<int32_t>(arrays, "status", batch);
  if (arrays.contains("node_states")) out.node_states = output<uint32_t>(arrays, "node_states", nodes);
  return out;
}

DraftInputs inputs_of(const DraftSizes& sizes, const RawArray& logits, const Array<int32_t>& roots,
                      const Array<int32_t>& base_lengths) {
  check_sizes(sizes);
  const size_t count = static_cast<size_t>(sizes.batch_size * sizes.block_size) * static_cast<size_t>(sizes.vocab_size);
  need(logits.size() == count, "size of logits");
  need(logits.itemsize() == (sizes.logit_type == kFloat32 ? 4 : 2), "type of logits");
  need(roots.size() == static_cast<size_t>(sizes.batch_size), "size of roots");
  need(base_lengths.size() == static_cast<size_t>(sizes.batch_size), "size of base_lengths");
  return {logits.data(), roots.data(), base_lengths.data(), nullptr};
}

// The drafter's own vocabulary: `vocab_map` [V], the token of each of its ids, none where ids are tokens; and the other way
// round `draft_ids`, the id of each token, kNoNode where there is none.
using VocabMap = std::optional<Array<int32_t>>;
using DraftIdArray = std::optional<Array<uint32_t>>;

void set_map(const DraftSizes& sizes, const VocabMap& vocab_map, DraftInputs& inputs) {
  if (!vocab_map) return;
  need(vocab_map->size() == static_cast<size_t>(sizes.vocab_size), "size of vocab_map");
  inputs.vocab_map = vocab_map->data();
}

void build(const DraftSizes& sizes, const RawArray& logits, const Array<int32_t>& roots,
           const Array<int32_t>& base_lengths, const VocabMap& vocab_map, const nb::dict& outputs, int num_threads) {
  DraftInputs inputs = inputs_of(sizes, logits, roots, base_lengths);
  set_map(sizes, vocab_map, inputs);
  const DraftOutputs out = outputs_of(sizes, outputs);
  nb::gil_scoped_release release;
  build_draft_trees(sizes, inputs, out, num_threads);
}

// What both kinds of constraints are given beside their rules.
struct Held {
  const Array<uint32_t>& start_states;
  const VocabMap& vocab_map;
  const DraftIdArray& draft_ids;
  bool renormalise;
  int num_threads;
};

template <typename Rules>
void build_held(const DraftSizes& sizes, DraftInputs inputs, const nb::dict& outputs, const Rules& rules,
                uint32_t num_states, const Held& held) {
  need(held.start_states.size() == static_cast<size_t>(sizes.batch_size), "size of start_states");
  for (size_t i = 0; i < held.start_states.size(); ++i)
    need(held.start_states.data()[i] < num_states || held.start_states.data()[i] == kNoNode, "start_states");
  set_map(sizes, held.vocab_map, inputs);
  need(held.vocab_map.has_value() == held.draft_ids.has_value(), "vocab_map without draft_ids");
  DraftIds ids{nullptr, 0};
  if (held.draft_ids) ids = {held.draft_ids->data(), static_cast<uint32_t>(held.draft_ids->size())};
  const DraftConstraint<Rules> constraint{rules, ids, held.start_states.data(), held.renormalise ? 1 : 0};
  const DraftOutputs out = outputs_of(sizes, outputs);
  nb::gil_scoped_release release;
  build_held_draft_trees(sizes, inputs, constraint, out, held.num_threads);
}

void build_legal(const DraftSizes& sizes, const RawArray& logits, const Array<int32_t>& roots,
                 const Array<int32_t>& base_lengths, const nb::dict& outputs, const PyTrie& trie, int64_t end_token,
                 const Array<uint32_t>& start_states, const VocabMap& vocab_map, const DraftIdArray& draft_ids,
                 bool renormalise, int num_threads) {
  const TrieView& view = trie.trie.view();
  build_held(sizes, inputs_of(sizes, logits, roots, base_lengths), outputs, TrieRules{view, end_token}, view.num_nodes,
             {start_states, vocab_map, draft_ids, renormalise, num_threads});
}

void build_masked(const DraftSizes& sizes, const RawArray& logits, const Array<int32_t>& roots,
                  const Array<int32_t>& base_lengths, const nb::dict& outputs, nb::handle masks,
                  const Array<uint32_t>& start_states, const VocabMap& vocab_map, const DraftIdArray& draft_ids,
                  bool renormalise, int num_threads) {
  const MaskView& view = mask_view(masks);
  build_held(sizes, inputs_of(sizes, logits, roots, base_lengths), outputs, MaskRules{view}, view.num_nodes + 1,
             {start_states, vocab_map, draft_ids, renormalise, num_threads});
}

}  // namespace

void bind_draft(nb::module_& m) {
  nb::class_<DraftSizes>(m, "DraftSizes", "The sizes of one build of draft trees.")
      .def(
          "__init__",
          [](DraftSizes* self, int64_t batch_size, int64_t block_size, int32_t vocab_size, int32_t num_nodes,
             int32_t top_k, int32_t first_row, bool self_padding, int32_t logit_type) {
            new (self) DraftSizes{batch_size, block_size, vocab_size,           num_nodes,
                                  top_k,      first_row,  self_padding ? 1 : 0, logit_type};
          },
          nb::kw_only(), nb::arg("batch_size"), nb::arg("block_size"), nb::arg("vocab_size"), nb::arg("num_nodes"),
          nb::arg("top_k"), nb::arg("first_row"), nb::arg("self_padding"), nb::arg("logit_type"));
  m.def("build_draft_trees", &build, nb::arg("sizes"), nb::arg("logits"), nb::arg("roots"), nb::arg("base_lengths"),
        nb::arg("vocab_map").none(), nb::arg("outputs"), nb::arg("num_threads"));
  m.def("build_legal_draft_trees", &build_legal, nb::arg("sizes"), nb::arg("logits"), nb::arg("roots"),
        nb::arg("base_lengths"), nb::arg("outputs"), nb::arg("trie"), nb::arg("end_token"), nb::arg("start_states"),
        nb::arg("vocab_map").none(), nb::arg("draft_ids").none(), nb::arg("renormalise"), nb::arg("num_threads"));
  m.def("build_masked_draft_trees", &build_masked, nb::arg("sizes"), nb::arg("logits"), nb::arg("roots"),
        nb::arg("base_lengths"), nb::arg("outputs"), nb::arg("masks"), nb::arg("start_states"),
        nb::arg("vocab_map").none(), nb::arg("draft_ids").none(), nb::arg("renormalise"), nb::arg("num_threads"));
}

}  // namespace flashtrie
