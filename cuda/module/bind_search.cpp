#include "bindings.hpp"
#include "host/hit_lines.hpp"
#include "host/search.hpp"

namespace flashtrie {
namespace {

using Grid3 = nb::shape<-1, -1, -1>;

nb::tuple search_batch(const PyTrie& trie, nb::ndarray<const uint32_t, Grid3, nb::c_contig, nb::device::cpu> tokens,
                       nb::ndarray<const float, Grid3, nb::c_contig, nb::device::cpu> logprobs, Array<float> factors,
                       uint32_t beam_width, uint32_t num_results, float token_threshold, float sequence_threshold,
                       uint32_t eos, uint32_t padding, int num_threads) {
  for (int axis = 0; axis < 3; ++axis)
    if (tokens.shape(axis) != logprobs.shape(axis)) throw std::invalid_argument("tokens and logprobs differ in shape");
  if (factors.size() != tokens.shape(1) + 1) throw std::invalid_argument("one length factor a step and one more");
  SearchParams params{};
  params.token_threshold = token_threshold;
  params.sequence_threshold = sequence_threshold;
  params.beam_width = beam_width;
  params.num_results = num_results;
  params.padding = padding;
  params.eos = eos;
  params.length_factors = factors.data();
  const Grids grids{tokens.data(), logprobs.data(), tokens.shape(0), tokens.shape(1), tokens.shape(2)};
  SearchOutput output;
  {
    nb::gil_scoped_release release;
    output = search(trie.trie, grids, params, num_threads);
  }
  return nb::make_tuple(to_numpy(std::move(output.hit_offsets)), to_numpy(std::move(output.key_ids)),
                        to_numpy(std::move(output.scores)), to_numpy(std::move(output.normalised_scores)),
                        to_numpy(std::move(output.token_offsets)), to_numpy(std::move(output.tokens)),
                        to_numpy(std::move(output.query_ns)));
}

Lines lines_of(const std::optional<nb::bytes>& lines) {
  return lines ? Lines(lines->c_str(), lines->size()) : Lines();
}

nb::bytes format_hits(Array<int64_t> hit_offsets, Array<uint32_t> key_ids, Array<float> scores,
                      Array<float> normalised_scores, Array<int64_t> token_offsets, Array<uint32_t> tokens,
                      uint64_t first_query, std::optional<nb::bytes> names, std::optional<nb::bytes> texts,
                      std::optional<nb::bytes> values, int num_threads) {
  const uint64_t num_hits = key_ids.size();
  if (hit_offsets.size() == 0 || hit_offsets(hit_offsets.size() - 1) != static_cast<int64_t>(num_hits) ||
      scores.size() != num_hits || normalised_scores.size() != num_hits || token_offsets.size() != num_hits + 1 ||
      token_offsets(num_hits) != static_cast<int64_t>(tokens.size()))
    throw std::invalid_argument("arrays of hits differ in length");
  const HitColumns columns{hit_offsets.data(), key_ids.data(), scores.data(), normalised_scores.data(), token_offsets.data(),
                           tokens.data(), hit_offsets.size() - 1, first_query, lines_of(names), lines_of(texts),
                           lines_of(values)};
  const auto parts = without_gil([&] { return hit_lines(columns, num_threads); });
  size_t size = 0;
  for (const std::string& part : parts) size += part.size();
  auto lines = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!lines.is_valid()) throw nb::python_error();
  char* to = PyBytes_AsString(lines.ptr());
  without_gil([&] { join_parts(parts, to, num_threads); });
  return lines;
}

}  // namespace

void bind_search(nb::module_& m) {
  m.def("search", &search_batch, nb::arg("trie"), nb::kw_only(), nb::arg("tokens"), nb::arg("logprobs"),
        nb::arg("length_factors"), nb::arg("beam_width"), nb::arg("num_results"), nb::arg("token_threshold"),
        nb::arg("sequence_threshold"), nb::arg("eos"), nb::arg("padding"), nb::arg("num_threads"));
  m.def("format_hits", &format_hits, nb::kw_only(), nb::arg("hit_offsets"), nb::arg("key_ids"), nb::arg("scores"),
        nb::arg("normalised_scores"), nb::arg("token_offsets"), nb::arg("tokens"), nb::arg("first_query"),
        nb::arg("names").none(), nb::arg("texts").none(), nb::arg("values").none(), nb::arg("num_threads"));
  m.def(
      "find_bad_logprob",
      [](Array<float> logprobs, int num_threads) {
        nb::gil_scoped_release release;
        return find_bad_logprob(logprobs.data(), logprobs.size(), num_threads);
      },
      nb::arg("logprobs"), nb::arg("num_threads"), "Flat index of the first NaN or +inf, or -1.");
}

}  // namespace flashtrie
