#include "bindings.hpp"
#include "host/baselines.hpp"
#include "host/yardstick.hpp"

namespace flashtrie {
namespace {

using Tokens = nb::ndarray<const uint32_t, nb::shape<-1, -1, -1>, nb::c_contig, nb::device::cpu>;
using Logprobs = nb::ndarray<const float, nb::shape<-1, -1, -1>, nb::c_contig, nb::device::cpu>;

// The caller is flashtrie_cli's own wrapper, which has checked plan and grids like the engine's.
template <typename Search>
nb::tuple run(const Tokens& tokens, const Logprobs& logprobs, const Array<float>& factors, uint32_t beam_width,
              uint32_t num_results, float token_threshold, float sequence_threshold, uint32_t eos, uint32_t padding,
              const Search& search) {
  for (int axis = 0; axis < 3; ++axis)
    if (tokens.shape(axis) != logprobs.shape(axis)) throw std::invalid_argument("tokens and logprobs differ in shape");
  if (factors.size() != tokens.shape(1) + 1) throw std::invalid_argument("one length factor a step and one more");
  const SearchParams params{token_threshold, sequence_threshold, beam_width, num_results, padding, eos, factors.data()};
  const Grids grids{tokens.data(), logprobs.data(), tokens.shape(0), tokens.shape(1), tokens.shape(2)};
  SearchOutput output = without_gil([&] { return search(grids, params); });
  return nb::make_tuple(to_numpy(std::move(output.hit_offsets)), to_numpy(std::move(output.key_ids)),
                        to_numpy(std::move(output.scores)), to_numpy(std::move(output.normalised_scores)),
                        to_numpy(std::move(output.token_offsets)), to_numpy(std::move(output.tokens)),
                        to_numpy(std::move(output.query_ns)));
}

}  // namespace

void bind_baselines(nb::module_& m) {
  m.def(
      "search_marisa_int",
      [](const PyTrie& trie, Tokens tokens, Logprobs logprobs, Array<float> factors, uint32_t beam_width,
         uint32_t num_results, float token_threshold, float sequence_threshold, uint32_t eos, uint32_t padding) {
        return run(tokens, logprobs, factors, beam_width, num_results, token_threshold, sequence_threshold, eos, padding,
                   [&](const Grids& grids, const SearchParams& params) {
                     return search_marisa_int(trie.trie, grids, params);
                   });
      },
      nb::arg("trie"), nb::kw_only(), nb::arg("tokens"), nb::arg("logprobs"), nb::arg("length_factors"),
      nb::arg("beam_width"), nb::arg("num_results"), nb::arg("token_threshold"), nb::arg("sequence_threshold"),
      nb::arg("eos"), nb::arg("padding"));
  nb::class_<MarisaOpt>(m, "MarisaOpt", "The paper's MARISA-Opt over a trie, with its worker pool.")
      .def(
          "__init__",
          [](MarisaOpt* self, const PyTrie& trie, int num_threads) { new (self) MarisaOpt(trie.trie, num_threads); },
          nb::arg("trie"), nb::kw_only(), nb::arg("num_threads"), nb::keep_alive<1, 2>())
      .def(
          "search",
          [](MarisaOpt& self, Tokens tokens, Logprobs logprobs, Array<float> factors, uint32_t beam_width,
             uint32_t num_results, float token_threshold, float sequence_threshold, uint32_t eos, uint32_t padding) {
            return run(tokens, logprobs, factors, beam_width, num_results, token_threshold, sequence_threshold, eos,
                       padding,
                       [&](const Grids& grids, const SearchParams& params) { return self.search(grids, params); });
          },
          nb::kw_only(), nb::arg("tokens"), nb::arg("logprobs"), nb::arg("length_factors"), nb::arg("beam_width"),
          nb::arg("num_results"), nb::arg("token_threshold"), nb::arg("sequence_threshold"), nb::arg("eos"),
          nb::arg("padding"));
  nb::class_<Yardstick>(m, "Yardstick", "Fixed work beside which an engine is timed.")
      .def(nb::init<uint64_t>(), nb::arg("table_size"))
      .def(
          "run", [](Yardstick& self, uint64_t round) { return without_gil([&] { return self.run(round); }); },
          nb::arg("round"));
}

}  // namespace flashtrie
