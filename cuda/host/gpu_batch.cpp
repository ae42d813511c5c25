#include "gpu_batch.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gpu_query.hpp"
#include "threads.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashtrie {
namespace {

constexpr uint32_t kPatience = 1 << 14;  // looks before the caller is asked whether to go on: some 10 ms
constexpr size_t kPiece = 1 << 20, kBytesAThread = 2 << 20;  // fewer are copied before a thread has begun

// Twin of PackedHits in flashtrie/pack_hits.cuh.
struct Packing {
  GpuPlaces to;
  uint64_t begin, before, after, told, bad_slots;
};

void check(int code) {
  if (code != 0) throw GpuError{code};
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void copy(unsigned char* to, const unsigned char* from, size_t num_bytes, int num_threads) {
  const uint64_t pieces = (num_bytes + kPiece - 1) / kPiece;
  num_threads = static_cast<int>(std::min<uint64_t>(num_threads, 1 + num_bytes / kBytesAThread));
  parallel_for(pieces, 1, num_threads, [&](int, uint64_t piece, uint64_t) {
    std::memcpy(to + piece * kPiece, from + piece * kPiece, std::min(kPiece, num_bytes - piece * kPiece));
  });
}

uint64_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

// One call of `run`.
struct GpuBatch::Run {
  const GpuBatch& batch;
  const std::vector<GpuChunk>& chunks;
  const unsigned char *tokens, *logprobs;
  bool are_pinned;
  const GpuPlaces& to;
  int num_threads;
  const std::function<void()>& interrupted;
  std::vector<uint64_t> begins;  // by chunk: its first query
  GpuBatchOutcome outcome{0, 0, 0, ~0u};
  uint32_t patience = 0;

  const GpuLane& lane(size_t chunk) const { return batch.lanes_[chunk % batch.lanes_.size()]; }
  bool comes_after(size_t chunk) const { return chunk >= batch.lanes_.size(); }

  void wait(void* event) {
    for (;;) {
      const int code = batch.driver_.query_event(event);
      if (code == 0) return;
      if (code != kGpuNotReady) throw GpuError{code};
      pause();
      if (++patience < kPatience) continue;
      patience = 0;
      interrupted();
    }
  }

  // Grids to the device, and their search.
  void search(size_t i) {
    const GpuBatchDriver& driver = batch.driver_;
    const GpuBatchShape& shape = batch.shape_;
    const GpuLane& on = lane(i);
    const GpuChunk& chunk = chunks[i];
    const unsigned char *from_tokens = tokens + begins[i] * shape.token_bytes,
                        *from_logprobs = logprobs + begins[i] * shape.logprob_bytes;
    const size_t token_bytes = chunk.num_queries * shape.token_bytes, logprob_bytes = chunk.num_queries * shape.logprob_bytes;
    if (!are_pinned) {
      if (comes_after(i)) wait(on.searched);  // what was staged before has gone over
      copy(on.staged_tokens, from_tokens, token_bytes, num_threads);
      copy(on.staged_logprobs, from_logprobs, logprob_bytes, num_threads);
      from_tokens = on.staged_tokens;
      from_logprobs = on.staged_logprobs;
    }
    check(driver.upload(on.tokens, from_tokens, token_bytes, on.search_stream));
    check(driver.upload(on.logprobs, from_logprobs, logprob_bytes, on.search_stream));
    if (comes_after(i)) check(driver.wait_event(on.search_stream, on.packed, 0));
    if (i == 0 && shape.events[0]) check(driver.record(shape.events[0], on.search_stream));
    void* parameters[] = {const_cast<unsigned char*>(chunk.record.data())};
    check(driver.launch(chunk.function, chunk.num_blocks, 1, 1, chunk.num_threads, 1, 1, chunk.shared_bytes,
                        on.search_stream, parameters, nullptr));
    check(driver.record(on.searched, on.search_stream));
  }

  // Its answers, packed behind those of the chunk before.
  void pack(size_t i) {
    const GpuBatchDriver& driver = batch.driver_;
    const GpuBatchShape& shape = batch.shape_;
    const GpuLane& on = lane(i);
    const GpuChunk& chunk = chunks[i];
    const uint64_t before = i == 0 ? shape.zeros : shape.totals[(i - 1) & 1];
    Packing packing{on.places, before, before, shape.totals[i & 1], address(on.told), address(on.bad_slots)};
    if (chunk.is_direct) {
      packing.to = to;
      packing.to.hit_offsets += 8 * (1 + begins[i]);  // they begin with a 0
      packing.to.token_offsets += 8;
      packing.begin = shape.zeros;
    }
    check(driver.wait_event(on.pack_stream, on.searched, 0));
    if (i > 0) check(driver.wait_event(on.pack_stream, lane(i - 1).packed, 0));
    void* parameters[] = {const_cast<unsigned char*>(chunk.record.data()), &packing};
    check(driver.launch(shape.pack, chunk.num_queries, 1, 1, 128, 1, 1, 16, on.pack_stream, parameters, nullptr));
    if (i + 1 == chunks.size() && shape.events[1]) check(driver.record(shape.events[1], on.pack_stream));
    check(driver.record(on.packed, on.pack_stream));
  }

  // Waits for the packed answers and enqueues their way to where they belong. False for a bad log-prob.
  bool deliver(size_t i) {
    const GpuLane& on = lane(i);
    const GpuChunk& chunk = chunks[i];
    wait(on.packed);
    std::atomic_thread_fence(std::memory_order_acquire);
    uint32_t* const bad_end = on.bad_slots + chunk.num_queries;
    uint32_t* const bad = std::find_if(on.bad_slots, bad_end, [](uint32_t slot) { return slot != ~0u; });
    if (bad != bad_end) {
      outcome.bad_query = begins[i] + (bad - on.bad_slots);
      outcome.bad_slot = *bad;
      std::fill(on.bad_slots, bad_end, ~0u);
      return false;
    }
    const uint64_t hit = outcome.num_hits, token = outcome.num_tokens;
    const uint64_t hits = on.told[0] - hit, num_tokens = on.told[1] - token;
    outcome.num_hits += hits;
    outcome.num_tokens += num_tokens;
    if (chunk.is_direct) return true;
    const GpuPlaces& from = on.places;
    fetch(to.hit_offsets + 8 * (1 + begins[i]), from.hit_offsets, 8 * chunk.num_queries, on);
    fetch(to.key_ids + 4 * hit, from.key_ids, 4 * hits, on);
    fetch(to.scores + 4 * hit, from.scores, 4 * hits, on);
    fetch(to.normalised_scores + 4 * hit, from.normalised_scores, 4 * hits, on);
    fetch(to.token_offsets + 8 * (1 + hit), from.token_offsets, 8 * hits, on);
    fetch(to.tokens + 4 * token, from.tokens, 4 * num_tokens, on);
    return true;
  }

  void fetch(uint64_t at, uint64_t from, size_t num_bytes, const GpuLane& on) {
    if (num_bytes) check(batch.driver_.download(reinterpret_cast<void*>(static_cast<uintptr_t>(at)), from, num_bytes, on.pack_stream));
  }

  // Until nothing is under way.
  void settle() {
    for (const GpuLane& on : batch.lanes_) {
      batch.driver_.synchronize(on.search_stream);
      batch.driver_.synchronize(on.pack_stream);
    }
  }
};

void GpuBatch::stage(size_t lane, unsigned char* tokens, unsigned char* logprobs) {
  lanes_.at(lane).staged_tokens = tokens;
  lanes_.at(lane).staged_logprobs = logprobs;
}

GpuBatchOutcome GpuBatch::run(const std::vector<GpuChunk>& chunks, const unsigned char* tokens, const unsigned char* logprobs,
                              bool are_pinned, const GpuPlaces& to, int num_threads,
                              const std::function<void()>& interrupted) {
  Run run{*this, chunks, tokens, logprobs, are_pinned, to, num_threads, interrupted, {}};
  uint64_t begin = 0;
  for (const GpuChunk& chunk : chunks) {
    run.begins.push_back(begin);
    begin += chunk.num_queries;
  }
  const size_t count = chunks.size(), num_lanes = lanes_.size();
  try {
    size_t delivered = 0;
    bool is_good = true;
    for (size_t i = 0; i < count && is_good; ++i) {
      run.search(i);
      if (i >= num_lanes) is_good = run.deliver(delivered++);
      if (is_good) run.pack(i);
    }
    while (is_good && delivered < count) is_good = run.deliver(delivered++);
  } catch (...) {
    run.settle();
    throw;
  }
  run.settle();
  return run.outcome;
}

}  // namespace flashtrie
