// Why marisa-opt is as fast as it is here: the same search with MARISA's own bit vector under it, and with a heap that is
// locked, popped and pushed for every match, beside the shipped one and the cpu engine. Compiled and fed by marisa_opt.py.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "host/baseline_common.hpp"
#include "host/baselines.hpp"
#include "host/search.hpp"

using namespace flashtrie;

namespace {

// MARISA's bit vector: ones before every 512 bits, seven counts within them, the place of every 512th zero. select0 looks
// for the 512 bits between two samples, then for the word, then in it (Yata, grimoire/vector/bit-vector).
class BitVector {
 public:
  void push(bool bit) {
    if (size_ % 64 == 0) words_.push_back(0);
    words_.back() |= uint64_t(bit) << (size_ % 64);
    ++size_;
  }

  void index() {
    words_.resize(words_.size() / 8 * 8 + 16);
    blocks_.resize(words_.size() / 8);
    uint64_t ones = 0;
    for (size_t b = 0; b < blocks_.size(); ++b) {
      blocks_[b].ones = static_cast<uint32_t>(ones);
      uint16_t within = 0;
      for (size_t w = 0; w < 8; ++w) {
        if (w > 0) blocks_[b].within[w - 1] = within;
        within = static_cast<uint16_t>(within + popcount64(words_[8 * b + w]));
      }
      ones += within;
    }
    uint64_t zeros = 0;
    for (uint64_t at = 0; at < size_; ++at)
      if (!(*this)[at] && zeros++ % 512 == 0) samples_.push_back(static_cast<uint32_t>(at));
    samples_.push_back(static_cast<uint32_t>(size_));
  }

  bool operator[](uint64_t at) const { return (words_[at / 64] >> (at % 64)) & 1; }

  uint64_t select0(uint64_t k) const {
    const uint64_t sample = k / 512;
    if (k % 512 == 0) return samples_[sample];
    uint64_t begin = samples_[sample] / 512, end = (uint64_t(samples_[sample + 1]) + 511) / 512;
    if (begin + 10 >= end)
      while (k >= zeros_before(begin + 1)) ++begin;
    else
      while (begin + 1 < end) {
        const uint64_t middle = (begin + end) / 2;
        (k < zeros_before(middle) ? end : begin) = middle;
      }
    k -= zeros_before(begin);
    uint64_t word = 0;
    while (word < 7 && k >= 64 * (word + 1) - blocks_[begin].within[word]) ++word;
    if (word > 0) k -= 64 * word - blocks_[begin].within[word - 1];
    return 64 * (8 * begin + word) + select_one64(~words_[8 * begin + word], static_cast<int>(k));
  }

 private:
  struct Block {
    uint32_t ones;
    uint16_t within[7];
  };
  uint64_t zeros_before(uint64_t block) const { return 512 * block - blocks_[block].ones; }

  std::vector<uint64_t> words_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> samples_;
  uint64_t size_ = 0;
};

struct Counts {
  uint64_t beams = 0, children = 0, slots = 0, matches = 0, admitted = 0, updates = 0;
};
Counts* counting = nullptr;

// The resident trie of the engines: a child range in two reads, labels of two bytes side by side.
struct OurNodes {
  TrieView trie;

  template <typename Hit>
  void match(uint32_t node, const uint32_t* tokens, const Hit& hit) const {
    const ChildRange range = child_range(trie, node);
    uint64_t slot = 0;
    for (uint32_t child = range.first; child < range.last; ++child) {
      const uint32_t label = trie.label_low[child];
      while (tokens[slot] < label) ++slot;
      if (tokens[slot] == label) hit(child, slot);
    }
    if (counting) counting->children += range.fan_out(), counting->slots += slot;
  }
  bool has_children(uint32_t node) const { return !is_leaf(trie, node); }
  bool is_key(uint32_t node) const { return is_terminal(trie, node); }
};

// MARISA's: select0 for the place of the children, a louds bit and a link flag for each, labels of four bytes.
struct MarisaNodes {
  BitVector louds;
  std::vector<uint32_t> bases;
  std::vector<uint64_t> link_flags, terminal_flags;

  explicit MarisaNodes(const TrieArrays& a)
      : bases(a.label_low, a.label_low + a.num_nodes),
        link_flags(a.num_nodes / 64 + 1),
        terminal_flags(a.terminal, a.terminal + a.terminal_words) {
    louds.push(true);
    louds.push(false);
    for (uint64_t at = 0; at + 1 < 2 * a.num_nodes; ++at) louds.push(test_bit(a.louds, at));
    louds.index();
  }

  template <typename Hit>
  void match(uint32_t node, const uint32_t* tokens, const Hit& hit) const {
    uint64_t at = louds.select0(node) + 1;
    uint32_t child = static_cast<uint32_t>(at - node - 1);
    uint64_t slot = 0;
    for (; louds[at]; ++at, ++child) {
      if (test_bit(link_flags.data(), child)) abort();  // no tails in a trie over tokens
      while (tokens[slot] < bases[child]) ++slot;
      if (tokens[slot] == bases[child]) hit(child, slot);
    }
    if (counting) counting->children += at - louds.select0(node) - 1, counting->slots += slot;
  }
  bool has_children(uint32_t node) const { return louds[louds.select0(node) + 1]; }
  bool is_key(uint32_t node) const { return test_bit(terminal_flags.data(), node); }
};

struct Item {
  uint64_t key;
  float score;
  uint32_t parent, token, depth;
};

// A bounded min-heap behind a lock. Gathered: as shipped, with a floor that is read without the lock, matches that come 64 at
// a time, and one way down to replace the least. Else the lock, a pop and a push for each.
template <bool kGathered>
class Heap {
 public:
  std::vector<Item> items;

  void reset(uint64_t limit) {
    limit_ = limit;
    items.clear();
    floor_ = 0;
  }
  bool admits(uint64_t key) const { return !kGathered || key > floor_.load(std::memory_order_relaxed); }
  void put(const Item& item) {
    if (counting) ++counting->admitted;
    gathered_.push_back(item);
    if (!kGathered || gathered_.size() == 64) flush();
  }
  void flush() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Item& item : gathered_) insert(item);
    gathered_.clear();
  }

 private:
  static bool above(const Item& a, const Item& b) { return a.key > b.key; }

  void insert(const Item& item) {
    const bool is_full = items.size() == limit_;
    if (is_full && item.key <= items.front().key) return;
    if (counting) ++counting->updates;
    if (!is_full) {
      items.push_back(item);
      std::push_heap(items.begin(), items.end(), above);
    } else if (kGathered) {
      size_t hole = 0;
      for (size_t child; (child = 2 * hole + 1) < items.size(); hole = child) {
        if (child + 1 < items.size() && items[child + 1].key < items[child].key) ++child;
        if (items[child].key >= item.key) break;
        items[hole] = items[child];
      }
      items[hole] = item;
    } else {
      std::pop_heap(items.begin(), items.end(), above);
      items.back() = item;
      std::push_heap(items.begin(), items.end(), above);
    }
    if (items.size() == limit_) floor_.store(items.front().key, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::vector<Item> gathered_;
  uint64_t limit_ = 0;
  std::atomic<uint64_t> floor_{0};
};

// marisa-opt (baseline_marisa_opt.cpp) on one thread, over either kind of nodes and heap.
template <typename Nodes, bool kGathered>
class Search {
 public:
  Search(const Trie& trie, const Nodes& nodes, const SearchParams& params)
      : trie_(trie), nodes_(nodes), params_(params) {}

  std::vector<uint32_t> run(const Grids& grids, uint64_t query) {
    beams_.assign(1, {0, 0.0f});
    results_.reset(params_.num_results);
    history_.resize(grids.num_steps);
    for (step_ = 0; step_ < grids.num_steps && !beams_.empty(); ++step_) {
      const uint64_t slot = (query * grids.num_steps + step_) * grids.num_slots;
      row_.load(trie_.view(), params_, grids.tokens + slot, grids.logprobs + slot, grids.num_slots);
      candidates_.reset(params_.beam_width);
      if (counting) counting->beams += beams_.size();
      for (uint32_t place = 0; place < beams_.size(); ++place)
        nodes_.match(beams_[place].first, row_.tokens.data(),
                     [&](uint32_t child, uint64_t at) { judge(place, child, at); });
      candidates_.flush();
      results_.flush();
      survive();
    }
    std::vector<Item>& found = results_.items;
    std::sort(found.begin(), found.end(), [](const Item& a, const Item& b) { return a.key > b.key; });
    std::vector<uint32_t> ids;
    for (const Item& hit : found) {
      ids.push_back(key_id(trie_.view(), key_node(hit.key)));
      ids.push_back(hit.token);
      uint32_t place = hit.parent;
      for (uint32_t step = hit.depth - 1; step-- > 0; place = history_[step][place].first)
        ids.push_back(history_[step][place].second);
    }
    return ids;
  }

 private:
  void judge(uint32_t place, uint32_t child, uint64_t at) {
    if (counting) ++counting->matches;
    const float score = beams_[place].second + row_.logprobs[at];
    if (!(score > params_.sequence_threshold)) return;
    const uint64_t key = rank_key(score, child);
    const uint64_t result_key = rank_key(score * params_.length_factors[step_ + 1], child);
    const Item item{key, score, place, row_.tokens[at], step_ + 1};
    if (candidates_.admits(key) && nodes_.has_children(child)) candidates_.put(item);
    if (results_.admits(result_key) && nodes_.is_key(child))
      results_.put({result_key, score, place, row_.tokens[at], step_ + 1});
  }

  void survive() {
    const std::vector<Item>& kept = candidates_.items;
    beams_.resize(kept.size());
    history_[step_].resize(kept.size());
    for (size_t i = 0; i < kept.size(); ++i) {
      beams_[i] = {key_node(kept[i].key), kept[i].score};
      history_[step_][i] = {kept[i].parent, kept[i].token};
    }
  }

  const Trie& trie_;
  const Nodes& nodes_;
  const SearchParams params_;
  SortedRow row_;
  uint32_t step_ = 0;
  std::vector<std::pair<uint32_t, float>> beams_;
  Heap<kGathered> candidates_, results_;
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> history_;
};

template <typename T>
std::vector<T> load(const std::string& path, size_t spare = 0) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const size_t size = static_cast<size_t>(file.tellg());
  std::vector<T> values(size / sizeof(T) + spare);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(size));
  return values;
}

// Of this thread: a slice of time lost to another process is not in it.
double processor_ms() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

Grids one_query(const Grids& grids, uint64_t query) {
  const uint64_t begin = query * grids.num_steps * grids.num_slots;
  return {grids.tokens + begin, grids.logprobs + begin, 1, grids.num_steps, grids.num_slots};
}

}  // namespace

// usage: marisa_opt FOLDER WIDTH PASSES; prints one line of JSON
int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string folder = std::string(argv[1]) + "/", width = argv[2];
  const auto louds = load<uint64_t>(folder + "louds", kSpareWords), terminal = load<uint64_t>(folder + "terminal");
  const auto labels = load<uint16_t>(folder + "label_low");
  const auto tokens = load<uint32_t>(folder + "tokens." + width);
  const auto logprobs = load<float>(folder + "logprobs." + width), factors = load<float>(folder + "factors");
  const auto shape = load<uint64_t>(folder + "shape." + width);
  TrieArrays arrays;
  arrays.louds = louds.data();
  arrays.louds_words = louds.size();
  arrays.terminal = terminal.data();
  arrays.terminal_words = terminal.size();
  arrays.label_low = labels.data();
  arrays.num_labels = arrays.num_nodes = labels.size();
  const Trie trie(arrays, 1);
  const Grids grids{tokens.data(), logprobs.data(), shape[0], shape[1], shape[2]};
  SearchParams params{};
  params.token_threshold = params.sequence_threshold = -INFINITY;
  params.beam_width = params.num_results = static_cast<uint32_t>(atoi(width.c_str()));
  params.padding = params.eos = kNoToken;
  params.length_factors = factors.data();

  const OurNodes ours{trie.view()};
  const MarisaNodes theirs(arrays);
  MarisaOpt shipped(trie, 1);
  Search<OurNodes, true> copy(trie, ours, params);
  Search<OurNodes, false> heap(trie, ours, params);
  Search<MarisaNodes, true> nodes(trie, theirs, params);
  Search<MarisaNodes, false> both(trie, theirs, params);
  constexpr int kSystems = 6;
  double total[kSystems] = {};
  for (uint64_t query = 0; query < grids.num_queries; ++query) {
    const Grids one = one_query(grids, query);
    double fastest[kSystems];
    std::vector<uint32_t> answers[kSystems];
    std::fill_n(fastest, kSystems, 1e300);
    for (int pass = 0; pass < atoi(argv[3]); ++pass)
      for (int system = 0; system < kSystems; ++system)
        for (int again = 0; again < 2; ++again) {  // the first call finds caches that another system left
          const double begin = processor_ms();
          if (system == 0) answers[0] = search(trie, one, params, 1).key_ids;
          if (system == 1) answers[1] = shipped.search(one, params).key_ids;
          if (system == 2) answers[2] = copy.run(grids, query);
          if (system == 3) answers[3] = heap.run(grids, query);
          if (system == 4) answers[4] = nodes.run(grids, query);
          if (system == 5) answers[5] = both.run(grids, query);
          const double took = processor_ms() - begin;
          if (again) fastest[system] = std::min(fastest[system], took);
        }
    if (answers[0] != answers[1] || answers[2] != answers[3] || answers[2] != answers[4] || answers[2] != answers[5])
      return 70;
    for (int system = 0; system < kSystems; ++system) total[system] += fastest[system];
  }
  Counts with_floor, without;
  counting = &with_floor;
  for (uint64_t query = 0; query < grids.num_queries; ++query) nodes.run(grids, query);
  counting = &without;
  for (uint64_t query = 0; query < grids.num_queries; ++query) both.run(grids, query);
  printf("{\"ms\": [");
  for (int system = 0; system < kSystems; ++system)
    printf("%s%.4f", system > 0 ? ", " : "", total[system] / static_cast<double>(grids.num_queries));
  printf("], \"queries\": %llu", static_cast<unsigned long long>(grids.num_queries));
  const std::pair<const char*, uint64_t> counts[] = {
      {"beams", without.beams}, {"children", without.children}, {"slots", without.slots}, {"matches", without.matches},
      {"admitted", with_floor.admitted}, {"updates", with_floor.updates}, {"locks", without.admitted},
      {"pops", without.updates}};
  for (const auto& [name, count] : counts)
    printf(", \"%s\": %.0f", name, static_cast<double>(count) / static_cast<double>(grids.num_queries));
  printf("}\n");
}
