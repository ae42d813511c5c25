#include "search.hpp"

#include <chrono>

#include "scan.hpp"
#include "step_row.hpp"
#include "threads.hpp"
#include "top.hpp"

namespace flashtrie {
namespace {

// A fan-out this many times the number of proposals is searched once per proposal instead of scanned: a binary
// search costs about as much as scanning this many labels (measured: 80 ns against 0.4 ns a label with AVX-512).
constexpr uint64_t kScanPerSlot = 192;

// Beams expanded between two looks at the floors; enough that their reads overlap.
constexpr uint32_t kBeamsPerTurn = 64;

struct Candidate {
  uint64_t key;     // rank_key(score, node)
  uint32_t parent;  // place in the frontier it was expanded from
  uint32_t token;
};

struct Result {
  uint64_t key;  // rank_key(normalised score, node)
  float score;
  uint32_t depth;   // number of tokens
  uint32_t parent;  // place in the frontier of step depth - 1
  uint32_t token;
};

// A hit that may count, once its node's line says what it is.
struct Pending {
  uint64_t key;  // rank_key(score, child)
  float total;   // score, and the end of sequence where one is asked for
  uint32_t child, beam, token;
};

struct Survivor {
  uint32_t parent, token;
};

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

// One thread's search, its buffers kept from query to query.
class Searcher {
 public:
  Searcher(const Trie& trie, const SearchParams& params) : trie_(trie.view()), params_(params), scan_(scan_labels()) {}

  // Afterwards `results` holds the hits, best first.
  void run(const uint32_t* tokens, const float* logprobs, uint64_t num_steps, uint64_t num_slots);
  std::span<const Result> results() const { return results_.items(); }
  // The tokens of a result, front to back.
  void backtrace(const Result& result, std::vector<uint32_t>& to) const;

 private:
  void begin_step(const uint32_t* tokens, const float* logprobs, uint64_t num_steps, uint64_t num_slots);
  bool may_contribute(uint32_t beam) const;
  void find_ranges(uint32_t begin, uint32_t end);
  void find_hits(uint32_t begin, uint32_t end);
  void search_wide(ChildRange range);
  void judge_hits();
  void route(const Pending& hit);
  void end_step();

  const TrieView trie_;
  const SearchParams params_;
  const ScanLabels scan_;
  StepRow row_;
  uint32_t step_ = 0;
  bool can_end_ = true;   // whether results are possible at this step
  float end_logprob_ = 0;  // of the end of sequence at the next step; 0 without one
  float best_logprob_ = 0;       // of this step's proposals
  std::vector<uint32_t> nodes_;  // the frontier, best first
  std::vector<float> scores_;
  std::vector<ChildRange> ranges_;
  std::vector<uint32_t> hit_children_, hit_beams_;
  uint64_t num_hits_ = 0;
  std::vector<Pending> pending_;
  Top<Candidate> candidates_;
  Top<Result> results_;
  std::vector<std::vector<Survivor>> history_;  // by step, by place in the frontier after it
};

void Searcher::run(const uint32_t* tokens, const float* logprobs, uint64_t num_steps, uint64_t num_slots) {
  nodes_.assign(1, 0);
  scores_.assign(1, 0.0f);
  results_.reset(params_.num_results);
  if (history_.size() < num_steps) history_.resize(num_steps);
  const uint64_t row = num_slots;
  for (step_ = 0; step_ < num_steps && !nodes_.empty(); ++step_) {
    begin_step(tokens + step_ * row, logprobs + step_ * row, num_steps, num_slots);
    // Best beams first, some at a time: their candidates raise the floors that the next ones must reach at all.
    const uint32_t num_beams = static_cast<uint32_t>(nodes_.size());
    for (uint32_t begin = 0; begin < num_beams && may_contribute(begin); begin += kBeamsPerTurn) {
      const uint32_t end = std::min(begin + kBeamsPerTurn, num_beams);
      find_ranges(begin, end);
      find_hits(begin, end);
      judge_hits();
    }
    end_step();
  }
  results_.select();
  results_.sort();
}

void Searcher::begin_step(const uint32_t* tokens, const float* logprobs, uint64_t num_steps, uint64_t num_slots) {
  row_.load(trie_, params_, tokens, logprobs, num_slots);
  best_logprob_ = row_.best_logprob();
  candidates_.reset(params_.beam_width);
  can_end_ = true;
  end_logprob_ = 0;
  if (params_.eos == kNoToken) return;
  can_end_ = false;
  if (step_ + 1 == num_steps) return;
  for (uint64_t slot = num_slots; slot < 2 * num_slots; ++slot) {
    if (!slot_ends(params_, tokens[slot], logprobs[slot])) continue;
    end_logprob_ = can_end_ ? std::max(end_logprob_, logprobs[slot]) : logprobs[slot];
    can_end_ = true;
  }
}

// Whether a beam, or any behind it, could still give a candidate or a result that stays. Float addition and the
// length factor are monotone, so what the best proposal cannot reach nothing can; node 0 would win every tie.
bool Searcher::may_contribute(uint32_t beam) const {
  const float score = scores_[beam] + best_logprob_;
  if (candidates_.admits(rank_key(score, 0))) return true;
  const float total = params_.eos == kNoToken ? score : score + end_logprob_;
  return can_end_ && results_.admits(rank_key(total * params_.length_factors[step_ + 1], 0));
}

// Two dependent reads a beam; those of a turn overlap, since each pass prefetches for the next.
void Searcher::find_ranges(uint32_t begin, uint32_t end) {
  ranges_.resize(nodes_.size());
  for (uint32_t beam = begin; beam < end; ++beam) {
    const uint32_t node = nodes_[beam];
    const NodeLine& line = trie_.lines[node >> 6];
    if (line.wide == kNotWide) {
      const uint64_t bit = (uint64_t(node) & ~uint64_t(63)) + line.first_child - 1;
      prefetch(trie_.louds + (bit >> 6));
    } else {
      prefetch(trie_.wide + uint64_t(line.wide) * kWideStride + (node & 63));
    }
  }
  for (uint32_t beam = begin; beam < end; ++beam) {
    ranges_[beam] = child_range(trie_, nodes_[beam]);
    prefetch(trie_.label_low + ranges_[beam].first);
  }
}

void Searcher::find_hits(uint32_t begin, uint32_t end) {
  num_hits_ = 0;
  const uint64_t num_distinct = row_.tokens().size();
  if (num_distinct == 0) return;
  for (uint32_t beam = begin; beam < end; ++beam) {
    const ChildRange range = ranges_[beam];
    const uint64_t fan_out = range.fan_out();
    const uint64_t room = num_hits_ + std::max(fan_out, num_distinct) + kScanSlack;
    if (hit_children_.size() < room) {
      hit_children_.resize(2 * room);
      hit_beams_.resize(2 * room);
    }
    const uint64_t before = num_hits_;
    if (fan_out > kScanPerSlot * num_distinct)
      search_wide(range);
    else if (fan_out < 8)
      num_hits_ += scan_labels_portable(trie_.label_low + range.first, fan_out, row_.bitmap(), range.first,
                                        hit_children_.data() + num_hits_);
    else
      num_hits_ += scan_(trie_.label_low + range.first, fan_out, row_.bitmap(), range.first,
                         hit_children_.data() + num_hits_);
    for (uint64_t hit = before; hit < num_hits_; ++hit) hit_beams_[hit] = beam;
  }
}

void Searcher::search_wide(ChildRange range) {
  for (uint32_t token : row_.tokens()) {
    const uint32_t child = find_child(trie_, range, token);
    if (child != kNoNode) hit_children_[num_hits_++] = child;
  }
}

// First what needs no memory beyond the labels: score and floors. What passes has its line prefetched, and is
// routed once the lines of all are under way.
void Searcher::judge_hits() {
  constexpr size_t kAhead = 64;
  const float factor = params_.length_factors[step_ + 1];
  pending_.clear();
  auto route_all = [this] {
    for (const Pending& hit : pending_) route(hit);
    pending_.clear();
  };
  for (uint64_t hit = 0; hit < num_hits_; ++hit) {
    const uint32_t child = hit_children_[hit], beam = hit_beams_[hit];
    const uint32_t token = label(trie_, child);
    float logprob;
    if (!row_.find(token, &logprob)) continue;
    const float score = scores_[beam] + logprob;
    if (!(score > params_.sequence_threshold)) continue;
    const float total = params_.eos == kNoToken ? score : score + end_logprob_;
    const uint64_t key = rank_key(score, child);
    if (!candidates_.admits(key) && !(can_end_ && results_.admits(rank_key(total * factor, child)))) continue;
    prefetch(trie_.lines + (child >> 6));
    pending_.push_back({key, total, child, beam, token});
    if (pending_.size() == kAhead) route_all();
  }
  route_all();
}

void Searcher::route(const Pending& hit) {
  const NodeLine& line = trie_.lines[hit.child >> 6];
  const uint64_t bit = uint64_t(1) << (hit.child & 63);
  candidates_.push_if(!(line.leaf & bit) & candidates_.admits(hit.key), {hit.key, hit.beam, hit.token});
  if (!can_end_) return;
  const uint64_t result_key = rank_key(hit.total * params_.length_factors[step_ + 1], hit.child);
  results_.push_if((line.terminal & bit) && results_.admits(result_key),
                   {result_key, hit.total, step_ + 1, hit.beam, hit.token});
}

void Searcher::end_step() {
  candidates_.select();
  candidates_.sort();
  const std::span<const Candidate> kept = candidates_.items();
  std::vector<Survivor>& history = history_[step_];
  nodes_.resize(kept.size());
  scores_.resize(kept.size());
  history.resize(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) {
    nodes_[i] = key_node(kept[i].key);
    scores_[i] = key_score(kept[i].key);
    history[i] = {kept[i].parent, kept[i].token};
    prefetch(trie_.lines + (nodes_[i] >> 6));
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
