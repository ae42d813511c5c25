#include <memory>
#include <string>

#include "buffer.hpp"
#include "host/copy_pool.hpp"
#include "host/gpu_batch.hpp"
#include "host/gpu_query.hpp"

namespace flashtrie {
namespace {

struct Chunks {
  std::vector<GpuChunk> all;
  uint64_t num_queries = 0;
};

GpuBatchDriver driver_at(const std::vector<uint64_t>& functions) {
  if (functions.size() != 7) throw std::invalid_argument("seven functions");
  GpuBatchDriver driver{};
  set_function(driver.launch, functions[0]);
  set_function(driver.record, functions[1]);
  set_function(driver.query_event, functions[2]);
  set_function(driver.wait_event, functions[3]);
  set_function(driver.upload, functions[4]);
  set_function(driver.download, functions[5]);
  set_function(driver.synchronize, functions[6]);
  return driver;
}

GpuPlaces places_at(const uint64_t* addresses) {
  return {addresses[0], addresses[1], addresses[2], addresses[3], addresses[4], addresses[5]};
}

GpuLane lane_at(const std::vector<uint64_t>& parts) {
  if (parts.size() != 16) throw std::invalid_argument("a lane has sixteen addresses");
  return {at<void>(parts[0]), at<void>(parts[1]), at<void>(parts[2]), at<void>(parts[3]), at<void>(parts[4]), at<void>(parts[5]),
          parts[6], parts[7], places_at(&parts[8]), at<uint64_t>(parts[14]), at<uint32_t>(parts[15])};
}

// A failure of the driver's as an error of Python's.
template <typename Work>
auto driving(const Work& work) {
  try {
    return without_gil(work);
  } catch (const GpuError& error) {
    throw std::runtime_error("the driver said " + std::to_string(error.code));
  }
}

// Contiguous arrays.
void copy_arrays(CopyPool& self, const std::vector<nb::object>& targets, const std::vector<nb::object>& sources) {
  if (targets.size() != sources.size()) throw std::invalid_argument("as many targets as sources");
  std::vector<std::unique_ptr<Buffer>> held;
  CopyPool::Job job(CopyFor::kCaller);
  for (size_t i = 0; i < sources.size(); ++i) {
    const Buffer& from = *held.emplace_back(std::make_unique<Buffer>(sources[i]));
    const Buffer& to = *held.emplace_back(std::make_unique<Buffer>(targets[i], from.size(), true));
    self.add(job, to.as<void>(), from.as<void>(), from.size());
  }
  without_gil([&] {
    self.begin(job);
    self.finish(job);
  });
}

bool start(GpuBatch& self, const Chunks& chunks, nb::handle tokens, nb::handle logprobs, bool is_staged) {
  const Buffer from_tokens(tokens, chunks.num_queries * self.shape().token_bytes),
      from_logprobs(logprobs, chunks.num_queries * self.shape().logprob_bytes);
  const bool is_pinned = are_pinned(from_tokens, from_logprobs);
  if (!is_pinned && !is_staged) return false;
  driving([&] {
    self.start(chunks.all, from_tokens.as<unsigned char>(), from_logprobs.as<unsigned char>(), is_pinned);
  });
  return true;
}

nb::tuple finish(GpuBatch& self, const std::vector<uint64_t>& to, const std::vector<uint64_t>& kept) {
  if (to.size() != 6 || (!kept.empty() && kept.size() != 6)) throw std::invalid_argument("an answer has six arrays");
  const GpuPlaces copies = places_at(kept.empty() ? to.data() : kept.data());
  const GpuBatchOutcome outcome =
      driving([&] { return self.finish(places_at(to.data()), kept.empty() ? nullptr : &copies, check_signals); });
  return nb::make_tuple(outcome.num_hits, outcome.num_tokens, outcome.bad_query, outcome.bad_slot);
}

}  // namespace

void bind_gpu_batch(nb::module_& m) {
  nb::class_<CopyPool>(m, "CopyPool", "Threads that copy memory while whoever asked for it goes on.")
      .def(nb::init<int, size_t>(), nb::arg("num_threads"), nb::arg("piece_bytes") = 128 << 10)
      .def("copy_arrays", &copy_arrays, nb::arg("targets"), nb::arg("sources"), "Of the same sizes.");
  nb::class_<Chunks>(m, "GpuChunks", "How a batch is cut, and how the search of each part is launched.")
      .def(nb::init<>())
      .def(
          "add",
          [](Chunks& self, uint32_t num_queries, uint64_t function, unsigned num_blocks, unsigned num_threads,
             unsigned shared_bytes, bool is_direct, const nb::bytes& record) {
            const auto* bytes = reinterpret_cast<const unsigned char*>(record.c_str());
            self.all.push_back({num_queries, at<void>(function), num_blocks, num_threads, shared_bytes, is_direct,
                                std::vector<unsigned char>(bytes, bytes + record.size())});
            self.num_queries += num_queries;
          },
          nb::kw_only(), nb::arg("num_queries"), nb::arg("function"), nb::arg("num_blocks"), nb::arg("num_threads"),
          nb::arg("shared_bytes"), nb::arg("is_direct"), nb::arg("record"));
  nb::class_<GpuBatch>(m, "GpuBatch", "Searches of batches on a GPU, chunk by chunk, without Python between.")
      .def(
          "__init__",
          [](GpuBatch* self, const std::vector<uint64_t>& driver, const std::vector<uint64_t>& grid_bytes,
             uint32_t lane_queries, uint64_t ordered_bytes, uint64_t upload_stream, const std::vector<uint64_t>& totals, uint64_t pack, const std::vector<uint64_t>& events,
             const std::vector<std::vector<uint64_t>>& lanes, CopyPool& copies) {
            if (grid_bytes.size() != 2 || totals.size() != 3 || events.size() != 2 || lanes.empty())
              throw std::invalid_argument("two sizes, three totals, two events, and lanes");
            const GpuBatchShape shape{lane_queries, grid_bytes[0], grid_bytes[1], ordered_bytes, at<void>(upload_stream),
                                      totals[0], {totals[1], totals[2]}, at<void>(pack),
                                      {at<void>(events[0]), at<void>(events[1])}};
            std::vector<GpuLane> all;
            for (const auto& parts : lanes) all.push_back(lane_at(parts));
            new (self) GpuBatch(driver_at(driver), shape, std::move(all), copies);
          },
          nb::kw_only(), nb::arg("driver"), nb::arg("grid_bytes"), nb::arg("lane_queries"), nb::arg("ordered_bytes"),
          nb::arg("upload_stream"), nb::arg("totals"), nb::arg("pack"), nb::arg("events"),
          nb::arg("lanes"), nb::arg("copies"), nb::keep_alive<1, 11>())
      .def(
          "stage",
          [](GpuBatch& self, const std::vector<std::vector<uint64_t>>& lanes) {
            if (lanes.size() != self.num_lanes()) throw std::invalid_argument("memory for each lane");
            for (size_t i = 0; i < lanes.size(); ++i)
              self.stage(i, at<unsigned char>(lanes[i].at(0)), at<unsigned char>(lanes[i].at(1)));
          },
          nb::arg("lanes"), "Pinned memory for tokens and for log-probs, by lane.")
      .def("start", &start, nb::arg("chunks"), nb::arg("tokens"), nb::arg("logprobs"), nb::arg("is_staged"),
           "Both grids must stay as they are until `finish`. False where they are not pinned and there is no memory to stage them.")
      .def("finish", &finish, nb::arg("to"), nb::arg("kept"), "Hits, tokens, and query and slot of a bad log-prob or all ones.")
      .def("stop", [](GpuBatch& self) { without_gil([&] { self.stop(); }); });
}

}  // namespace flashtrie
