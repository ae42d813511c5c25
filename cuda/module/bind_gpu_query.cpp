#include <algorithm>

#include "buffer.hpp"
#include "host/gpu_query.hpp"

namespace flashtrie {
namespace {

// Addresses: key ids, scores, normalised scores, token ends, tokens; and three counts.
GpuAnswer answer_at(const std::vector<uint64_t>& arrays, uint64_t counts) {
  if (arrays.size() != 5) throw std::invalid_argument("an answer has five arrays");
  auto* words = at<uint32_t>(counts);
  return {words, words + 1, words + 2, at<uint32_t>(arrays[0]), at<uint32_t>(arrays[1]), at<uint32_t>(arrays[2]),
          at<uint32_t>(arrays[3]), at<uint32_t>(arrays[4])};
}

}  // namespace

void bind_gpu_query(nb::module_& m) {
  m.def("note_pinned", [](uint64_t begin, uint64_t end) { pinned_ranges().add(begin, end); }, nb::arg("begin"), nb::arg("end"));
  m.def("forget_pinned", [](uint64_t begin) { pinned_ranges().remove(begin); }, nb::arg("begin"));
  nb::class_<GpuQuery>(m, "GpuQuery", "Searches of one query at a time on a GPU, launched without Python between.")
      .def(
          "__init__",
          [](GpuQuery* self, const std::vector<uint64_t>& driver, uint64_t function, uint64_t stream,
             const std::vector<uint64_t>& events, const std::vector<unsigned>& shape,
             const std::vector<nb::bytes>& records, const std::vector<uint64_t>& grid_at,
             const std::vector<uint64_t>& staging,
             const std::vector<uint64_t>& staging_bytes, const std::vector<std::vector<uint64_t>>& answers,
             const std::vector<uint64_t>& counts, uint32_t most_hits, uint32_t most_tokens) {
            if (driver.size() != 4 || events.size() != 2 || shape.size() != 3 || records.size() != 2 ||
                grid_at.size() != 2 || staging.size() != 2 ||
                staging_bytes.size() != 2 || answers.size() != 2 || counts.size() != 2)
              throw std::invalid_argument("four functions, three sizes, two of everything else");
            GpuDriver calls{};
            set_function(calls.launch, driver[0]);
            set_function(calls.query, driver[1]);
            set_function(calls.synchronize, driver[2]);
            set_function(calls.record, driver[3]);
            GpuLaunch launch{at<void>(function), at<void>(stream), {at<void>(events[0]), at<void>(events[1])}, shape[0], shape[1], shape[2],
                             grid_at[0], grid_at[1], {}};
            for (const auto& record : records)
              if (std::max(grid_at[0], grid_at[1]) + sizeof(void*) > record.size()) throw std::invalid_argument("a short record");
            for (int turn = 0; turn < 2; ++turn) {
              const auto* bytes = reinterpret_cast<const unsigned char*>(records[turn].c_str());
              launch.records[turn].assign(bytes, bytes + records[turn].size());
            }
            new (self) GpuQuery(calls, std::move(launch), at<void>(staging[0]), staging_bytes[0], at<void>(staging[1]),
                                staging_bytes[1], answer_at(answers[0], counts[0]), answer_at(answers[1], counts[1]),
                                most_hits, most_tokens);
          },
          nb::kw_only(), nb::arg("driver"), nb::arg("function"), nb::arg("stream"), nb::arg("events"), nb::arg("shape"), nb::arg("records"),
          nb::arg("grid_at"),          nb::arg("staging"), nb::arg("staging_bytes"), nb::arg("answers"), nb::arg("counts"), nb::arg("most_hits"),
          nb::arg("most_tokens"))
      .def(
          "start",
          [](GpuQuery& self, nb::handle tokens, nb::handle logprobs) {
            const Buffer from_tokens(tokens, self.token_bytes()), from_logprobs(logprobs, self.logprob_bytes());
            return self.start(from_tokens.as<void>(), from_logprobs.as<void>(), are_pinned(from_tokens, from_logprobs));
          },
          nb::arg("tokens"), nb::arg("logprobs"), "The driver's code; 0 where the search is under way.")
      .def(
          "finish",
          [](GpuQuery& self, nb::handle key_ids, nb::handle scores, nb::handle normalised_scores,
             nb::handle token_offsets, nb::handle tokens) {
            const size_t hits = self.most_hits();
            const Buffer ids(key_ids, 4 * hits, true), totals(scores, 4 * hits, true),
                normalised(normalised_scores, 4 * hits, true), offsets(token_offsets, 8 * (hits + 1), true),
                flat(tokens, size_t{4} * self.most_tokens(), true);
            const GpuHits to{ids.as<uint32_t>(), totals.as<uint32_t>(), normalised.as<uint32_t>(), offsets.as<int64_t>(),
                             flat.as<uint32_t>()};
            GpuOutcome outcome;
            int code = 0;
            bool has_failed = false;
            {
              nb::gil_scoped_release release;
              try {
                outcome = self.finish(to, check_signals);
              } catch (const GpuError& error) {
                has_failed = true;
                code = error.code;
              }
            }
            if (has_failed) throw std::runtime_error("the kernel ended with " + std::to_string(code));
            return nb::make_tuple(outcome.num_hits, outcome.num_tokens, outcome.bad_slot);
          },
          nb::arg("key_ids"), nb::arg("scores"), nb::arg("normalised_scores"), nb::arg("token_offsets"), nb::arg("tokens"),
          "Numbers of hits and tokens, and the first slot with a bad log-prob or 0xFFFFFFFF.");
}

}  // namespace flashtrie
