// Batches on a GPU that is none, to be run under ASan and TSan: what is asked of a stream happens later, in any order that
// the driver would allow, while threads copy grids and answers. Calls fail, callers stop, log-probs are bad; every answer is
// compared with one that is made query by query, and nothing may be under way when a search has ended.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "fuzz.hpp"
#include "host/copy_pool.hpp"
#include "host/gpu_batch.hpp"
#include "host/gpu_query.hpp"

using namespace flashtrie;

namespace {

constexpr uint32_t kSlots = 40;  // of a grid: a query's hits are as many as its first token says, modulo 4
constexpr uint32_t kMostHits = 3, kMostTokens = 1 + 2 + 3;
constexpr int kFailure = 719;

struct Grid {
  uint32_t tokens[kSlots];
  float logprobs[kSlots];
};

uint64_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

template <typename T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// The arrays of an answer.
struct Answer {
  std::vector<int64_t> hit_offsets, token_offsets;
  std::vector<uint32_t> key_ids, tokens;
  std::vector<float> scores, normalised_scores;

  explicit Answer(size_t num_queries)
      : hit_offsets(num_queries + 1), token_offsets(num_queries * kMostHits + 1), key_ids(num_queries * kMostHits),
        tokens(num_queries * kMostTokens), scores(key_ids.size()), normalised_scores(key_ids.size()) {}

  GpuPlaces places() {
    return {address(hit_offsets.data()), address(key_ids.data()), address(scores.data()), address(normalised_scores.data()),
            address(token_offsets.data()), address(tokens.data())};
  }

  bool operator==(const Answer&) const = default;
};

// What a query finds, behind what those before it found.
void find(const uint32_t* tokens, const float* logprobs, const GpuPlaces& to, uint64_t query, uint64_t& hits,
          uint64_t& num_tokens, uint64_t first_hit, uint64_t first_token) {
  for (uint32_t i = 0; i < tokens[0] % (kMostHits + 1); ++i, ++hits) {
    at<uint32_t>(to.key_ids)[hits - first_hit] = tokens[i];
    at<float>(to.scores)[hits - first_hit] = logprobs[i];
    at<float>(to.normalised_scores)[hits - first_hit] = logprobs[kSlots - 1 - i];
    for (uint32_t j = 0; j <= i; ++j) at<uint32_t>(to.tokens)[num_tokens++ - first_token] = tokens[kSlots - 1 - j];
    at<int64_t>(to.token_offsets)[hits - first_hit] = static_cast<int64_t>(num_tokens);
  }
  at<int64_t>(to.hit_offsets)[query] = static_cast<int64_t>(hits);
}

// A lane's memory on the device, and what its search found: the grids, as they were.
struct LaneMemory {
  std::vector<uint32_t> tokens, found_tokens;
  std::vector<float> logprobs, found_logprobs;
  Answer answer;
  uint64_t told[2] = {};
  std::vector<uint32_t> bad_slots;
  std::vector<unsigned char> staged_tokens, staged_logprobs;

  explicit LaneMemory(size_t queries)
      : tokens(queries * kSlots), found_tokens(tokens.size()), logprobs(tokens.size()), found_logprobs(tokens.size()),
        answer(queries), bad_slots(queries, ~0u), staged_tokens(4 * tokens.size()), staged_logprobs(4 * tokens.size()) {}
};

struct Record {
  uint32_t num_queries;
  LaneMemory* lane;
};

struct Packing {  // as in host/gpu_batch.cpp
  GpuPlaces to;
  uint64_t begin, before, after, told, bad_slots;
};

void search(const Record& record) {
  LaneMemory& lane = *record.lane;
  std::copy_n(lane.tokens.begin(), record.num_queries * kSlots, lane.found_tokens.begin());
  std::copy_n(lane.logprobs.begin(), record.num_queries * kSlots, lane.found_logprobs.begin());
}

void pack(const Record& record, const Packing& packing) {
  const auto *begin = at<uint64_t>(packing.begin), *before = at<uint64_t>(packing.before);
  uint64_t hits = before[0], tokens = before[1];
  const uint64_t first_hit = begin[0], first_token = begin[1];
  for (uint32_t q = 0; q < record.num_queries; ++q) {
    const float* logprobs = record.lane->found_logprobs.data() + q * kSlots;
    if (logprobs[0] > 0) at<uint32_t>(packing.bad_slots)[q] = 0;
    find(record.lane->found_tokens.data() + q * kSlots, logprobs, packing.to, q, hits, tokens, first_hit, first_token);
  }
  for (uint64_t to : {packing.after, packing.told}) {
    at<uint64_t>(to)[0] = hits;
    at<uint64_t>(to)[1] = tokens;
  }
}

// Streams and events. A look at an event lets a stream, drawn by lot, go one step.
struct Machine {
  struct Work {
    void* awaited;
    uint64_t number;
    std::function<void()> run;
  };
  std::map<void*, std::deque<Work>> streams;
  std::map<void*, uint64_t> asked, reached;
  uint64_t calls_left = ~uint64_t{0};  // before one fails

  bool is_idle() const {
    return std::all_of(streams.begin(), streams.end(), [](const auto& stream) { return stream.second.empty(); });
  }
  int enqueue(void* stream, std::function<void()> run, void* awaited = nullptr) {
    if (calls_left-- == 0) return kFailure;
    streams[stream].push_back({awaited, awaited ? asked[awaited] : 0, std::move(run)});
    return 0;
  }
  void run_one() {
    std::vector<std::deque<Work>*> ready;
    for (auto& [_, work] : streams)
      if (!work.empty() && (!work.front().awaited || reached[work.front().awaited] >= work.front().number))
        ready.push_back(&work);
    CHECK(!ready.empty() || is_idle());
    if (ready.empty()) return;
    std::deque<Work>& work = *ready[below(ready.size())];
    work.front().run();
    work.pop_front();
  }
} machine;

int launch(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream,
           void** parameters, void**) {
  Record record;
  memcpy(&record, parameters[0], sizeof record);
  if (function == at<void>(1)) return machine.enqueue(stream, [=] { search(record); });
  Packing packing;
  memcpy(&packing, parameters[1], sizeof packing);
  return machine.enqueue(stream, [=] { pack(record, packing); });
}
int record_event(void* event, void* stream) {
  const uint64_t number = ++machine.asked[event];
  return machine.enqueue(stream, [=] { machine.reached[event] = number; });
}
int query_event(void* event) {
  if (machine.calls_left-- == 0) return kFailure;
  machine.run_one();
  return machine.reached[event] >= machine.asked[event] ? 0 : kGpuNotReady;
}
int wait_event(void* stream, void* event, unsigned) { return machine.enqueue(stream, [] {}, event); }
int upload(uint64_t to, const void* from, size_t num_bytes, void* stream) {
  return machine.enqueue(stream, [=] { memcpy(at<void>(to), from, num_bytes); });
}
int download(void* to, uint64_t from, size_t num_bytes, void* stream) {
  return machine.enqueue(stream, [=] { memcpy(to, at<void>(from), num_bytes); });
}
int synchronize(void* stream) {
  while (!machine.streams[stream].empty()) machine.run_one();
  return 0;
}

// A batch object, its lanes, and batches of all kinds on it, one after another.
class Bench {
 public:
  explicit Bench(CopyPool& copies) : most_(1 + below(8)) {
    const size_t num_lanes = 1 + below(4);
    std::vector<GpuLane> lanes;
    for (size_t i = 0; i < num_lanes; ++i) {
      LaneMemory& memory = *memories_.emplace_back(std::make_unique<LaneMemory>(most_));
      const uint64_t handles = 100 + 10 * i;
      lanes.push_back({at<void>(handles), at<void>(handles + 1), at<void>(handles + 2), at<void>(handles + 3),
                       at<void>(handles + 4), at<void>(handles + 5), address(memory.tokens.data()), address(memory.logprobs.data()),
                       memory.answer.places(), memory.told, memory.bad_slots.data()});
    }
    const GpuBatchShape shape{static_cast<uint32_t>(most_), 4 * kSlots, 4 * kSlots, below(2) ? 0 : ~size_t{0}, at<void>(99),
                              address(totals_), {address(totals_ + 2), address(totals_ + 4)}, at<void>(2), {}};
    const GpuBatchDriver driver{launch, record_event, query_event, wait_event, upload, download, synchronize};
    batch_ = std::make_unique<GpuBatch>(driver, shape, std::move(lanes), copies);
    for (size_t i = 0; i < num_lanes; ++i)
      batch_->stage(i, memories_[i]->staged_tokens.data(), memories_[i]->staged_logprobs.data());
  }

  void search();

 private:
  std::vector<GpuChunk> cut(size_t num_chunks);

  const size_t most_;
  std::vector<std::unique_ptr<LaneMemory>> memories_;
  uint64_t totals_[6] = {};
  std::unique_ptr<GpuBatch> batch_;
};

std::vector<GpuChunk> Bench::cut(size_t num_chunks) {
  const size_t first_direct = below(num_chunks + 1);
  std::vector<GpuChunk> chunks;
  for (size_t i = 0; i < num_chunks; ++i) {
    const Record record{static_cast<uint32_t>(1 + below(most_)), memories_[i % memories_.size()].get()};
    std::vector<unsigned char> bytes(sizeof record);
    memcpy(bytes.data(), &record, sizeof record);
    chunks.push_back({record.num_queries, at<void>(1), 1, 1, 0, i >= first_direct || i + 1 == num_chunks, bytes});
  }
  return chunks;
}

void Bench::search() {
  const std::vector<GpuChunk> chunks = cut(1 + below(12));
  size_t num_queries = 0;
  for (const GpuChunk& chunk : chunks) num_queries += chunk.num_queries;
  std::vector<uint32_t> tokens(num_queries * kSlots);
  std::vector<float> logprobs(tokens.size());
  for (uint32_t& token : tokens) token = static_cast<uint32_t>(below(1000));
  for (float& logprob : logprobs) logprob = -static_cast<float>(below(1000));
  const uint64_t bad = below(4) ? ~uint64_t{0} : below(num_queries);
  if (bad != ~uint64_t{0}) logprobs[bad * kSlots] = 1;
  auto expected = std::make_unique<Answer>(num_queries), found = std::make_unique<Answer>(num_queries),
       kept = std::make_unique<Answer>(num_queries);
  uint64_t hits = 0, num_tokens = 0;
  GpuPlaces to = expected->places();
  to.hit_offsets += 8;
  to.token_offsets += 8;
  for (size_t q = 0; q < num_queries; ++q) find(&tokens[q * kSlots], &logprobs[q * kSlots], to, q, hits, num_tokens, 0, 0);
  const bool is_kept = below(2), is_pinned = below(3) == 0;
  machine.calls_left = below(5) ? ~uint64_t{0} : below(60);
  const GpuPlaces copies = kept->places();
  try {
    batch_->start(chunks, reinterpret_cast<unsigned char*>(tokens.data()), reinterpret_cast<unsigned char*>(logprobs.data()),
                  is_pinned);
    if (below(8) == 0) return batch_->stop();
    const GpuBatchOutcome outcome = batch_->finish(found->places(), is_kept ? &copies : nullptr, [] {});
    CHECK(outcome.bad_slot == (bad == ~uint64_t{0} ? ~0u : 0));
    if (outcome.bad_slot == 0) {
      CHECK(outcome.bad_query == bad);
    } else {
      CHECK(outcome.num_hits == hits && outcome.num_tokens == num_tokens);
      CHECK(*found == *expected);
      CHECK(!is_kept || *kept == *expected);
    }
  } catch (const GpuError& error) {
    CHECK(error.code == kFailure);
    machine.calls_left = ~uint64_t{0};
  }
  CHECK(machine.is_idle());
}

// Copies of several callers at once, some of them given up.
void check_pool(CopyPool& pool) {
  const auto copy_all = [&pool](uint64_t seed) {
    std::mt19937_64 lot(seed);
    for (int round = 0; round < 4; ++round) {
      std::vector<unsigned char> from(lot() % 5000), to(from.size());
      for (unsigned char& byte : from) byte = static_cast<unsigned char>(lot());
      CopyPool::Job job(lot() % 2 ? CopyFor::kDevice : CopyFor::kCaller);
      const size_t cut = from.empty() ? 0 : lot() % from.size();
      pool.add(job, to.data(), from.data(), cut);
      pool.add(job, to.data() + cut, from.data() + cut, from.size() - cut);
      pool.begin(job);
      if (lot() % 3 == 0) {
        pool.drop(job);
      } else {
        pool.finish(job);
        CHECK(to == from);
      }
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) callers.emplace_back(copy_all, source());
  copy_all(source());
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 300;
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 20261130;
  for (int round = 0; round < rounds; ++round) {
    source.seed(seed + round);
    CopyPool copies(1 + static_cast<int>(below(4)), 8 * (1 + below(40)));
    check_pool(copies);
    Bench bench(copies);
    for (int i = 0; i < 8; ++i) bench.search();
  }
  printf("batches: %d rounds from seed %llu\n", rounds, static_cast<unsigned long long>(seed));
}
