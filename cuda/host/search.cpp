#include "search.hpp"

#include <chrono>
#include <memory>

#include "expander.hpp"
#include "threads.hpp"

namespace flashtrie {
namespace {

struct Survivor {
  uint32_t parent, token;
};

// Searches one query at a time, on one thread. Buffers are kept from query to query.
class Searcher {
 public:
  Searcher(const Trie& trie, const SearchParams& params)
      : trie_(trie.view()), params_(params), expander_(trie, params_) {}

  // Afterwards `results` holds the hits, best first.
  void run(const uint32_t* tokens, const float* logprobs, uint64_t num_steps, uint64_t num_slots);
  std::span<const Result> results() const { return expander_.results().items(); }
  // The tokens of a result, front to back.
  void backtrace(const Result& result, std::vector<uint32_t>& to) const;

 private:
  Step step_at(const uint32_t* tokens, const float* logprobs, uint64_t num_slots, uint32_t number, bool is_last) const;
  void keep_survivors(std::vector<Survivor>& history);

  const TrieView trie_;
  const SearchParams params_;
  Expander expander_;
  Frontier frontier_;
  std::vector<std::vector<Survivor>> history_;  // by step, by place in the frontier after it
};

void Searcher::run(const uint32_t* tokens, const float* logprobs, uint64_t num_steps, uint64_t num_slots) {
  frontier_.nodes.assign(1, 0);
  frontier_.scores.assign(1, 0.0f);
  expander_.begin_query();
  if (history_.size() < num_steps) history_.resize(num_steps);
  for (uint32_t number = 0; number < num_steps && !frontier_.nodes.empty(); ++number) {
    const uint64_t row = number * num_slots;
    expander_.expand(frontier_, step_at(tokens + row, logprobs + row, num_slots, number, number + 1 == num_steps));
    keep_survivors(history_[number]);
  }
  expander_.results().sort();
}

Step Searcher::step_at(const uint32_t* tokens, const float* logprobs, uint64_t num_slots, uint32_t number,
                       bool is_last) const {
  Step step{tokens, logprobs, num_slots, number, params_.eos == kNoToken, 0};
  if (step.can_end || is_last) return step;
  for (uint64_t slot = num_slots; slot < 2 * num_slots; ++slot) {  // of the next step
    if (!slot_ends(params_, tokens[slot], logprobs[slot])) continue;
    step.end_logprob = step.can_end ? std::max(step.end_logprob, logprobs[slot]) : logprobs[slot];
    step.can_end = true;
  }
  return step;
}

void Searcher::keep_survivors(std::vector<Survivor>& history) {
  Top<Candidate>& candidates = expander_.candidates();
  candidates.sort();
  const std::span<const Candidate> kept = candidates.items();
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
  SearchOutput all;
  all.query_ns.resize(grids.num_queries);
  parallel_for(grids.num_queries, grain, num_threads, [&](int worker, uint64_t begin, uint64_t end) {
    if (!searchers[worker]) searchers[worker] = std::make_unique<Searcher>(trie, params);
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
