#include "gpu_batch.hpp"

#include <algorithm>
#include <atomic>

#include "gpu_query.hpp"
#include "pause.hpp"

namespace flashtrie {
namespace {

constexpr uint32_t kPatience = 1 << 14;  // looks before the caller is asked whether to go on: some 10 ms
constexpr unsigned kPackThreads = 128, kPackShared = 16;

// Twin of PackedHits in flashtrie/pack_hits.cuh.
struct Packing {
  GpuPlaces to;
  uint64_t begin, before, after, told, bad_slots;
};

void check(int code) {
  if (code != 0) throw GpuError{code};
}

uint64_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

void* at(uint64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

}  // namespace

void GpuBatch::stage(size_t lane, unsigned char* tokens, unsigned char* logprobs) {
  lanes_.at(lane).staged_tokens = tokens;
  lanes_.at(lane).staged_logprobs = logprobs;
}

void GpuBatch::start(const std::vector<GpuChunk>& chunks, const unsigned char* tokens, const unsigned char* logprobs,
                     bool are_pinned) {
  if (chunks_) stop();
  chunks_ = &chunks;
  tokens_ = tokens;
  logprobs_ = logprobs;
  are_pinned_ = are_pinned;
  begins_.assign(1, 0);
  for (const GpuChunk& chunk : chunks) begins_.push_back(begins_.back() + chunk.num_queries);
  uint64_t most = 0;
  for (const GpuChunk& chunk : chunks) most = std::max<uint64_t>(most, chunk.num_queries);
  keeps_order_ = chunks.size() > 1 && most * (shape_.token_bytes + shape_.logprob_bytes) >= shape_.ordered_bytes;
  num_staged_ = num_searched_ = num_packed_ = num_kept_ = 0;
  shares_.clear();
  outcome_ = {0, 0, 0, ~0u};
  try {
    while (num_searched_ < std::min(chunks.size(), lanes_.size())) {
      const size_t i = num_searched_;
      search(i, [] {});
      if (!chunks[i].is_direct && num_packed_ == i) pack(i, nullptr);
    }
  } catch (...) {
    stop();
    throw;
  }
}

GpuBatchOutcome GpuBatch::finish(const GpuPlaces& to, const GpuPlaces* kept, const std::function<void()>& interrupted) {
  if (!chunks_) throw GpuError{0};
  to_ = &to;
  kept_ = kept;
  const size_t count = chunks_->size();
  try {
    bool is_good = true;
    while (is_good && num_packed_ < count) {
      const size_t i = num_packed_;
      if (i == num_searched_) search(i, interrupted);
      if (comes_after(i)) is_good = deliver(shares_.size(), interrupted);
      if (is_good) pack(i, &to);
    }
    while (is_good && shares_.size() < count) is_good = deliver(shares_.size(), interrupted);
    if (is_good) {  // what has been packed has been searched; only what is on its way is waited for
      for (size_t i = count - std::min(count, lanes_.size()); i < count; ++i)
        if (!(*chunks_)[i].is_direct) check(driver_.synchronize(lane(i).pack_stream));
      keep_ahead();
      for (CopyPool::Job& job : keeping_) copies_.finish(job);
      keeping_.clear();
      chunks_ = nullptr;
    }
  } catch (...) {
    stop();
    throw;
  }
  if (chunks_) stop();
  return outcome_;
}

void GpuBatch::drop_copies() {
  for (CopyPool::Job& job : staging_) copies_.drop(job);
  for (CopyPool::Job& job : keeping_) copies_.drop(job);
  keeping_.clear();
}

void GpuBatch::stop() {
  drop_copies();
  driver_.synchronize(shape_.upload_stream);
  for (const GpuLane& on : lanes_) {
    driver_.synchronize(on.search_stream);
    driver_.synchronize(on.pack_stream);
    std::fill(on.bad_slots, on.bad_slots + shape_.lane_queries, ~0u);
  }
  chunks_ = nullptr;
}

void GpuBatch::wait(void* event, const std::function<void()>& interrupted) {
  for (;;) {
    const int code = driver_.query_event(event);
    if (code == 0) return;
    if (code != kGpuNotReady) throw GpuError{code};
    stage_ahead();
    keep_ahead();
    pause();
    if (++patience_ < kPatience) continue;
    patience_ = 0;
    interrupted();
  }
}

// Asks for copies of the grids that come next, to lanes from which the grids before have gone over.
void GpuBatch::stage_ahead() {
  while (!are_pinned_ && num_staged_ < chunks_->size()) {
    const size_t i = num_staged_;
    if (comes_after(i)) {
      if (i - lanes_.size() >= num_searched_) return;
      const int code = driver_.query_event(lane(i).uploaded);
      if (code == kGpuNotReady) return;
      check(code);
    }
    CopyPool::Job& job = staging_[i % lanes_.size()];
    const size_t num_queries = (*chunks_)[i].num_queries;
    copies_.add(job, lane(i).staged_tokens, tokens_ + begins_[i] * shape_.token_bytes, num_queries * shape_.token_bytes);
    copies_.add(job, lane(i).staged_logprobs, logprobs_ + begins_[i] * shape_.logprob_bytes, num_queries * shape_.logprob_bytes);
    copies_.begin(job);
    ++num_staged_;
  }
}

// Grids to the device, and their search.
void GpuBatch::search(size_t i, const std::function<void()>& interrupted) {
  const GpuLane& on = lane(i);
  const GpuChunk& chunk = (*chunks_)[i];
  const unsigned char *from_tokens = tokens_ + begins_[i] * shape_.token_bytes,
                      *from_logprobs = logprobs_ + begins_[i] * shape_.logprob_bytes;
  const size_t token_bytes = chunk.num_queries * shape_.token_bytes, logprob_bytes = chunk.num_queries * shape_.logprob_bytes;
  if (!are_pinned_) {
    for (stage_ahead(); num_staged_ <= i; stage_ahead()) wait(on.uploaded, interrupted);
    copies_.finish(staging_[i % lanes_.size()]);
    stage_ahead();
    from_tokens = on.staged_tokens;
    from_logprobs = on.staged_logprobs;
  }
  void* const stream = keeps_order_ ? shape_.upload_stream : on.search_stream;
  if (keeps_order_ && comes_after(i)) check(driver_.wait_event(stream, on.searched, 0));
  check(driver_.upload(on.tokens, from_tokens, token_bytes, stream));
  check(driver_.upload(on.logprobs, from_logprobs, logprob_bytes, stream));
  if (keeps_order_ || !are_pinned_) check(driver_.record(on.uploaded, stream));
  if (keeps_order_) check(driver_.wait_event(on.search_stream, on.uploaded, 0));
  if (comes_after(i)) check(driver_.wait_event(on.search_stream, on.packed, 0));
  if (i == 0 && shape_.events[0]) check(driver_.record(shape_.events[0], on.search_stream));
  void* parameters[] = {const_cast<unsigned char*>(chunk.record.data())};
  check(driver_.launch(chunk.function, chunk.num_blocks, 1, 1, chunk.num_threads, 1, 1, chunk.shared_bytes,
                       on.search_stream, parameters, nullptr));
  check(driver_.record(on.searched, on.search_stream));
  ++num_searched_;
}

// Its answers, packed behind those of the chunk before. `to`: for a direct one.
void GpuBatch::pack(size_t i, const GpuPlaces* to) {
  const GpuLane& on = lane(i);
  const GpuChunk& chunk = (*chunks_)[i];
  const uint64_t before = i == 0 ? shape_.zeros : shape_.totals[(i - 1) & 1];
  Packing packing{on.places, before, before, shape_.totals[i & 1], address(on.told), address(on.bad_slots)};
  if (chunk.is_direct) {
    packing.to = *to;
    packing.to.hit_offsets += 8 * (1 + begins_[i]);  // they begin with a 0
    packing.to.token_offsets += 8;
    packing.begin = shape_.zeros;
  }
  check(driver_.wait_event(on.pack_stream, on.searched, 0));
  if (i > 0) check(driver_.wait_event(on.pack_stream, lane(i - 1).packed, 0));
  void* parameters[] = {const_cast<unsigned char*>(chunk.record.data()), &packing};
  check(driver_.launch(shape_.pack, chunk.num_queries, 1, 1, kPackThreads, 1, 1, kPackShared, on.pack_stream, parameters, nullptr));
  if (i + 1 == chunks_->size() && shape_.events[1]) check(driver_.record(shape_.events[1], on.pack_stream));
  check(driver_.record(on.packed, on.pack_stream));
  ++num_packed_;
}

// Waits for the packed answers and enqueues their way to where they belong. False for a bad log-prob.
bool GpuBatch::deliver(size_t i, const std::function<void()>& interrupted) {
  const GpuLane& on = lane(i);
  const GpuChunk& chunk = (*chunks_)[i];
  wait(on.packed, interrupted);
  std::atomic_thread_fence(std::memory_order_acquire);
  uint32_t* const bad_end = on.bad_slots + chunk.num_queries;
  uint32_t* const bad = std::find_if(on.bad_slots, bad_end, [](uint32_t slot) { return slot != ~0u; });
  if (bad != bad_end) {
    outcome_.bad_query = begins_[i] + (bad - on.bad_slots);
    outcome_.bad_slot = *bad;
    return false;
  }
  keep_ahead();
  const uint64_t hit = outcome_.num_hits, token = outcome_.num_tokens;
  const uint64_t hits = on.told[0] - hit, num_tokens = on.told[1] - token;
  outcome_.num_hits += hits;
  outcome_.num_tokens += num_tokens;
  shares_.push_back({hit, hits, token, num_tokens});
  if (chunk.is_direct) return true;
  const GpuPlaces &from = on.places, &to = *to_;
  fetch(to.hit_offsets + 8 * (1 + begins_[i]), from.hit_offsets, 8 * chunk.num_queries, on);
  fetch(to.key_ids + 4 * hit, from.key_ids, 4 * hits, on);
  fetch(to.scores + 4 * hit, from.scores, 4 * hits, on);
  fetch(to.normalised_scores + 4 * hit, from.normalised_scores, 4 * hits, on);
  fetch(to.token_offsets + 8 * (1 + hit), from.token_offsets, 8 * hits, on);
  fetch(to.tokens + 4 * token, from.tokens, 4 * num_tokens, on);
  if (kept_) check(driver_.record(on.fetched, on.pack_stream));
  return true;
}

void GpuBatch::fetch(uint64_t to, uint64_t from, size_t num_bytes, const GpuLane& on) {
  if (num_bytes == 0) return;
  check(driver_.download(at(to), from, num_bytes, on.pack_stream));
}

// Asks for copies of answers that are there: to memory of the caller's, if there is any.
void GpuBatch::keep_ahead() {
  while (kept_ && num_kept_ < shares_.size()) {
    if (!(*chunks_)[num_kept_].is_direct) {
      const int code = driver_.query_event(lane(num_kept_).fetched);
      if (code == kGpuNotReady) return;
      check(code);
    }
    keep(num_kept_++);
  }
}

void GpuBatch::keep(size_t i) {
  const Share& share = shares_[i];
  CopyPool::Job& job = keeping_.emplace_back(CopyFor::kCaller);
  const auto add = [&](uint64_t GpuPlaces::* array, uint64_t offset, uint64_t num_bytes) {
    copies_.add(job, at(kept_->*array + offset), at(to_->*array + offset), num_bytes);
  };
  add(&GpuPlaces::hit_offsets, 8 * (1 + begins_[i]), 8 * uint64_t{(*chunks_)[i].num_queries});
  add(&GpuPlaces::key_ids, 4 * share.first_hit, 4 * share.num_hits);
  add(&GpuPlaces::scores, 4 * share.first_hit, 4 * share.num_hits);
  add(&GpuPlaces::normalised_scores, 4 * share.first_hit, 4 * share.num_hits);
  add(&GpuPlaces::token_offsets, 8 * (1 + share.first_hit), 8 * share.num_hits);
  add(&GpuPlaces::tokens, 4 * share.first_token, 4 * share.num_tokens);
  copies_.begin(job);
}

}  // namespace flashtrie
