#include <chrono>
#include <mutex>

#include "baseline_common.hpp"
#include "baselines.hpp"
#include "worker_pool.hpp"

namespace flashtrie {
namespace {

constexpr uint64_t kBeamsPerTurn = 8;  // beams a worker takes at a time; a beam costs 0.1 to 1 us
constexpr size_t kLocal = 64;          // candidates a worker gathers before it takes the lock

struct Item {
  uint64_t key;
  float score;
  uint32_t parent;  // place in the frontier it was expanded from
  uint32_t token;
  uint32_t depth;
};

// The best `limit` items of all workers: a binary min-heap behind a lock, its floor readable without.
class SharedHeap {
 public:
  void reset(uint64_t limit) {
    limit_ = limit;
    items_.clear();
    floor_.store(0, std::memory_order_relaxed);
  }

  bool admits(uint64_t key) const { return key > floor_.load(std::memory_order_relaxed); }

  void push(const std::vector<Item>& items) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Item& item : items) insert(item);
  }

  std::vector<Item>& items() { return items_; }

 private:
  static bool above(const Item& a, const Item& b) { return a.key > b.key; }

  void insert(const Item& item) {
    if (items_.size() < limit_) {
      items_.push_back(item);
      if (items_.size() < limit_) return;
      std::make_heap(items_.begin(), items_.end(), above);
    } else if (item.key > items_.front().key) {
      replace_least(item);
    } else {
      return;
    }
    floor_.store(items_.front().key, std::memory_order_relaxed);
  }

  // One way down the heap instead of the two of pop_heap and push_heap.
  void replace_least(const Item& item) {
    const size_t count = items_.size();
    size_t hole = 0;
    for (size_t child; (child = 2 * hole + 1) < count; hole = child) {
      if (child + 1 < count && items_[child + 1].key < items_[child].key) ++child;
      if (items_[child].key >= item.key) break;
      items_[hole] = items_[child];
    }
    items_[hole] = item;
  }

  std::mutex mutex_;
  std::vector<Item> items_;
  uint64_t limit_ = 0;
  std::atomic<uint64_t> floor_{0};
};

struct Beam {
  uint32_t node;
  float score;
};

struct Survivor {
  uint32_t parent, token;
};

}  // namespace

class MarisaOpt::Searcher {
 public:
  Searcher(const Trie& trie, int num_threads) : trie_(trie), view_(trie.view()), pool_(num_threads) {
    locals_.resize(static_cast<size_t>(pool_.size()));
  }

  SearchOutput search(const Grids& grids, const SearchParams& params);

 private:
  // A worker's candidates and results on their way to the heaps.
  struct alignas(64) Local {
    std::vector<Item> candidates, results;
  };

  void run(const Grids& grids, uint64_t query);
  void expand(uint32_t place, Local& local);
  void judge(uint32_t place, uint32_t child, uint64_t slot, Local& local);
  void end_step();
  void backtrace(const Item& result, std::vector<uint32_t>& tokens) const;

  const Trie& trie_;
  const TrieView view_;
  WorkerPool pool_;
  std::vector<Local> locals_;
  SearchParams params_{};
  SortedRow row_;
  EndOfSequence end_{true, 0.0f};
  uint32_t step_ = 0;
  std::vector<Beam> beams_;
  SharedHeap candidates_, results_;
  std::vector<std::vector<Survivor>> history_;
};

void MarisaOpt::Searcher::run(const Grids& grids, uint64_t query) {
  beams_.assign(1, {0, 0.0f});
  results_.reset(params_.num_results);
  if (history_.size() < grids.num_steps) history_.resize(grids.num_steps);
  for (step_ = 0; step_ < grids.num_steps && !beams_.empty(); ++step_) {
    const uint64_t slot = (query * grids.num_steps + step_) * grids.num_slots;
    row_.load(view_, params_, grids.tokens + slot, grids.logprobs + slot, grids.num_slots);
    end_ = end_of_sequence(params_, grids, query, step_);
    candidates_.reset(params_.beam_width);
    std::atomic<uint64_t> next{0};
    auto work = [&](int worker) {
      Local& local = locals_[static_cast<size_t>(worker)];
      for (uint64_t begin; (begin = next.fetch_add(kBeamsPerTurn, std::memory_order_relaxed)) < beams_.size();) {
        const uint64_t end = std::min<uint64_t>(begin + kBeamsPerTurn, beams_.size());
        for (uint64_t place = begin; place < end; ++place) expand(static_cast<uint32_t>(place), local);
      }
      candidates_.push(local.candidates);
      results_.push(local.results);
      local.candidates.clear();
      local.results.clear();
    };
    if (beams_.size() > kBeamsPerTurn)
      pool_.run(work);
    else
      work(0);  // one turn: waking the others would cost more
    end_step();
  }
  std::vector<Item>& found = results_.items();
  std::sort(found.begin(), found.end(), [](const Item& a, const Item& b) { return a.key > b.key; });
}

// Two pointers: the proposals and the children both ascend by token.
void MarisaOpt::Searcher::expand(uint32_t place, Local& local) {
  const ChildRange range = child_range(view_, beams_[place].node);
  const uint32_t* tokens = row_.tokens.data();
  uint64_t slot = 0;
  if (view_.high_width == 0) {
    const uint16_t* labels = view_.label_low;
    for (uint32_t child = range.first; child < range.last; ++child) {
      const uint32_t label = labels[child];
      while (tokens[slot] < label) ++slot;
      if (tokens[slot] == label) judge(place, child, slot, local);
    }
  } else {
    for (uint32_t child = range.first; child < range.last; ++child) {
      const uint32_t wide_label = label(view_, child);
      while (tokens[slot] < wide_label) ++slot;
      if (tokens[slot] == wide_label) judge(place, child, slot, local);
    }
  }
}

void MarisaOpt::Searcher::judge(uint32_t place, uint32_t child, uint64_t slot, Local& local) {
  const float score = beams_[place].score + row_.logprobs[slot];
  if (!(score > params_.sequence_threshold)) return;
  const uint64_t key = rank_key(score, child);
  const float total = ended_score(params_, end_, score);
  const uint64_t result_key = rank_key(total * params_.length_factors[step_ + 1], child);
  const bool may_stay = candidates_.admits(key);
  const bool may_end = end_.possible && results_.admits(result_key);
  if (!may_stay && !may_end) return;  // before the trie is read
  const uint32_t token = row_.tokens[slot];
  if (may_stay && !is_leaf(view_, child)) {
    local.candidates.push_back({key, score, place, token, step_ + 1});
    if (local.candidates.size() == kLocal) {
      candidates_.push(local.candidates);
      local.candidates.clear();
    }
  }
  if (may_end && is_terminal(view_, child)) {
    local.results.push_back({result_key, total, place, token, step_ + 1});
    if (local.results.size() == kLocal) {
      results_.push(local.results);
      local.results.clear();
    }
  }
}

void MarisaOpt::Searcher::end_step() {
  const std::vector<Item>& kept = candidates_.items();
  std::vector<Survivor>& history = history_[step_];
  beams_.resize(kept.size());
  history.resize(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) {
    beams_[i] = {key_node(kept[i].key), kept[i].score};
    history[i] = {kept[i].parent, kept[i].token};
  }
}

void MarisaOpt::Searcher::backtrace(const Item& result, std::vector<uint32_t>& tokens) const {
  tokens.resize(result.depth);
  tokens[result.depth - 1] = result.token;
  uint32_t place = result.parent;
  for (uint32_t step = result.depth - 1; step-- > 0;) {
    const Survivor& survivor = history_[step][place];
    tokens[step] = survivor.token;
    place = survivor.parent;
  }
}

SearchOutput MarisaOpt::Searcher::search(const Grids& grids, const SearchParams& params) {
  params_ = params;
  SearchOutput output;
  output.hit_offsets.push_back(0);
  output.token_offsets.push_back(0);
  std::vector<uint32_t> tokens;
  for (uint64_t query = 0; query < grids.num_queries; ++query) {
    const auto start = std::chrono::steady_clock::now();
    run(grids, query);
    for (const Item& result : results_.items()) {
      backtrace(result, tokens);
      append_hit(trie_, result.key, result.score, tokens, output);
    }
    output.hit_offsets.push_back(static_cast<int64_t>(output.key_ids.size()));
    output.query_ns.push_back(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count());
  }
  return output;
}

MarisaOpt::MarisaOpt(const Trie& trie, int num_threads)
    : searcher_(std::make_unique<Searcher>(trie, std::max(num_threads, 1))) {}
MarisaOpt::~MarisaOpt() = default;
SearchOutput MarisaOpt::search(const Grids& grids, const SearchParams& params) { return searcher_->search(grids, params); }

}  // namespace flashtrie
