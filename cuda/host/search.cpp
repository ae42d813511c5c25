#include "search.hpp"

#include <barrier>
#include <chrono>
#include <memory>
#include <thread>

#include "expander.hpp"
#include "threads.hpp"

namespace flashtrie {
namespace {

// From this beam width on, the beams of one query are shared among threads that have no query of their own
// (measured: starting a thread costs 30 us, a step of this many beams 100 us).
constexpr uint32_t kMinSharedBeams = 512;

struct Survivor {
  uint32_t parent, token;
};

// Searches one query at a time, on one thread or with the beams of each step shared among several. Buffers are
// kept from query to query.
class Searcher {
 public:
  Searcher(const Trie& trie, const SearchParams& params, int num_workers) : trie_(trie.view()), params_(params) {
    for (int worker = 0; worker < num_workers; ++worker) expanders_.emplace_back(trie, params_);
  }

  // Afterwards `results` holds the hits, best first.
  void run(const uint32_t* tokens, const float* logprobs, uint64_t num_steps, uint64_t num_slots);
  std::span<const Result> results() const { return expanders_[0].results().items(); }
  // The tokens of a result, front to back.
  void backtrace(const Result& result, std::vector<uint32_t>& to) const;

 private:
  // The grid of the query at hand.
  struct Grid {
    const uint32_t* tokens;
    const float* logprobs;
    uint64_t num_steps, num_slots;
  };

  void run_alone(const Grid& grid);
  void run_shared(const Grid& grid);
  void begin_step(const Grid& grid, uint32_t number);
  void expand_turns(Expander& expander);
  void end_step();

  const TrieView trie_;
  const SearchParams params_;
  std::vector<Expander> expanders_;  // one a worker; the first gathers what the others found
  Step step_{};
  Frontier frontier_;
  std::atomic<uint32_t> next_beam_{0};
  std::vector<std::vector<Survivor>> history_;  // by step, by place in the frontier after it
};

void Searcher::run(const uint32_t* tokens, const float* logprobs, uint64_t num_steps, uint64_t num_slots) {
  frontier_.nodes.assign(1, 0);
  frontier_.scores.assign(1, 0.0f);
  for (Expander& expander : expanders_) expander.begin_query();
  if (history_.size() < num_steps) history_.resize(num_steps);
  const Grid grid{tokens, logprobs, num_steps, num_slots};
  if (expanders_.size() == 1)
    run_alone(grid);
  else
    run_shared(grid);
  Top<Result>& results = expanders_[0].results();
  for (size_t other = 1; other < expanders_.size(); ++other) results.merge(expanders_[other].results());
  results.sort();
}

void Searcher::run_alone(const Grid& grid) {
  for (uint32_t number = 0; number < grid.num_steps && !frontier_.nodes.empty(); ++number) {
    begin_step(grid, number);
    expand_turns(expanders_[0]);
    end_step();
  }
}

// Two barriers a step: one opens it to all workers, one waits for the last of them.
void Searcher::run_shared(const Grid& grid) {
  const int num_workers = static_cast<int>(expanders_.size());
  std::barrier<> gate(num_workers);
  bool is_over = false;
  std::exception_ptr failure;
  std::mutex failure_mutex;
  auto expand = [&](int worker) {
    try {
      expand_turns(expanders_[worker]);
    } catch (...) {
      std::lock_guard<std::mutex> lock(failure_mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  for (int worker = 1; worker < num_workers; ++worker)
    helpers.emplace_back([&, worker] {
      for (gate.arrive_and_wait(); !is_over; gate.arrive_and_wait()) {
        expand(worker);
        gate.arrive_and_wait();
      }
    });
  try {  // nothing between the two gates throws, so the helpers always wait at the first one
    for (uint32_t number = 0; number < grid.num_steps && !frontier_.nodes.empty() && !failure; ++number) {
      begin_step(grid, number);
      gate.arrive_and_wait();
      expand(0);
      gate.arrive_and_wait();
      for (int other = 1; other < num_workers; ++other)
        expanders_[0].candidates().merge(expanders_[other].candidates());
      end_step();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  is_over = true;
  gate.arrive_and_wait();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

void Searcher::begin_step(const Grid& grid, uint32_t number) {
  const uint32_t* tokens = grid.tokens + number * grid.num_slots;
  const float* logprobs = grid.logprobs + number * grid.num_slots;
  next_beam_.store(0, std::memory_order_relaxed);
  step_ = {tokens, logprobs, grid.num_slots, number, params_.eos == kNoToken, 0};
  if (step_.can_end || number + 1 == grid.num_steps) return;
  for (uint64_t slot = grid.num_slots; slot < 2 * grid.num_slots; ++slot) {
    if (!slot_ends(params_, tokens[slot], logprobs[slot])) continue;
    step_.end_logprob = step_.can_end ? std::max(step_.end_logprob, logprobs[slot]) : logprobs[slot];
    step_.can_end = true;
  }
}

// Best beams first, some at a time: their candidates raise the floors that the next ones must reach at all.
void Searcher::expand_turns(Expander& expander) {
  constexpr uint32_t kTurn = Expander::kBeamsPerTurn;
  const uint32_t num_beams = static_cast<uint32_t>(frontier_.nodes.size());
  expander.begin_step(step_);
  while (true) {
    const uint32_t begin = next_beam_.fetch_add(kTurn, std::memory_order_relaxed);
    if (begin >= num_beams || !expander.expand(frontier_, step_, begin, std::min(begin + kTurn, num_beams))) return;
  }
}

void Searcher::end_step() {
  Top<Candidate>& candidates = expanders_[0].candidates();
  candidates.sort();
  const std::span<const Candidate> kept = candidates.items();
  std::vector<Survivor>& history = history_[step_.number];
  frontier_.nodes.resize(kept.size());
  frontier_.scores.resize(kept.size());
  history.resize(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) {
    frontier_.nodes[i] = key_node(kept[i].key);
    frontier_.scores[i] = key_score(kept[i].key);
    history[i] = {kept[i].parent, kept[i].token};
    __builtin_prefetch(trie_.lines + (frontier_.nodes[i] >> 6));
  }
}

void Searcher::backtrace(const Result& result, std::vector<uint32_t>& to) const {
  const size_t begin = to.size();
  to.resize(begin + result.depth);
  to[begin + result.depth - 1] = result.token;
  uint32_t place = result.parent;
  for (uint32_t step = result.depth - 1; step-- > 0;) {
    const Survivor& survivor = history_[step][place];
    to[begin + step] = survivor.token;
    place = survivor.parent;
  }
}

// What one worker answered for a run of queries.
struct Part {
  std::vector<int64_t> num_hits;
  SearchOutput output;
};

}  // namespace

int64_t find_bad_logprob(const float* logprobs, uint64_t count, int num_threads) {
  std::atomic<int64_t> bad{INT64_MAX};
  parallel_for(count, 1 << 20, num_threads, [&](int, uint64_t begin, uint64_t end) {
    // NaN and +inf are the floats that are not below +inf; one comparison, vectorised, then the place.
    bool any = false;
    for (uint64_t i = begin; i < end; ++i) any |= !(logprobs[i] < INFINITY);
    if (!any) return;
    uint64_t at = begin;
    while (logprobs[at] < INFINITY) ++at;
    int64_t known = bad.load();
    while (static_cast<int64_t>(at) < known && !bad.compare_exchange_weak(known, static_cast<int64_t>(at))) {
    }
  });
  return bad.load() == INT64_MAX ? -1 : bad.load();
}

SearchOutput search(const Trie& trie, const Grids& grids, const SearchParams& params, int num_threads) {
  const uint64_t grain = std::clamp<uint64_t>(grids.num_queries / (8 * std::max(num_threads, 1)), 1, 64);
  const uint64_t num_parts = (grids.num_queries + grain - 1) / grain;
  std::vector<Part> parts(num_parts);
  std::vector<std::unique_ptr<Searcher>> searchers(std::max(num_threads, 1));
  // Threads without a query of their own help with the beams of one.
  const uint64_t spare = grids.num_queries > 0 ? std::max(num_threads, 1) / grids.num_queries : 1;
  const int num_workers = params.beam_width >= kMinSharedBeams ? static_cast<int>(std::max<uint64_t>(spare, 1)) : 1;
  SearchOutput all;
  all.query_ns.resize(grids.num_queries);
  parallel_for(grids.num_queries, grain, num_threads, [&](int worker, uint64_t begin, uint64_t end) {
    if (!searchers[worker]) searchers[worker] = std::make_unique<Searcher>(trie, params, num_workers);
    Searcher& searcher = *searchers[worker];
    Part& part = parts[begin / grain];
    const uint64_t grid = grids.num_steps * grids.num_slots;
    for (uint64_t query = begin; query < end; ++query) {
      const auto start = std::chrono::steady_clock::now();
      searcher.run(grids.tokens + query * grid, grids.logprobs + query * grid, grids.num_steps, grids.num_slots);
      for (const Result& result : searcher.results()) {
        part.output.key_ids.push_back(key_id(trie.view(), key_node(result.key)));
        part.output.scores.push_back(result.score);
        part.output.normalised_scores.push_back(key_score(result.key));
        searcher.backtrace(result, part.output.tokens);
        part.output.token_offsets.push_back(static_cast<int64_t>(part.output.tokens.size()));
      }
      part.num_hits.push_back(static_cast<int64_t>(searcher.results().size()));
      all.query_ns[query] = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    }
  });

  all.hit_offsets.push_back(0);
  all.token_offsets.push_back(0);
  auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  for (Part& part : parts) {
    for (int64_t hits : part.num_hits) all.hit_offsets.push_back(all.hit_offsets.back() + hits);
    const int64_t base = static_cast<int64_t>(all.tokens.size());
    for (int64_t end : part.output.token_offsets) all.token_offsets.push_back(base + end);
    append(all.key_ids, part.output.key_ids);
    append(all.scores, part.output.scores);
    append(all.normalised_scores, part.output.normalised_scores);
    append(all.tokens, part.output.tokens);
    part = Part();
  }
  return all;
}

}  // namespace flashtrie
