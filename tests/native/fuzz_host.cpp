// The host engine without Python, to be run under ASan and UBSan: builds of random keys, every kind of question against
// a std::map, searches on one thread and on three, and the same questions to tries whose arrays were spoilt, in buffers
// of exact size. A spoilt trie is refused, or it is a trie: nothing may be read outside its arrays, nothing may hang.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fuzz.hpp"
#include "host/child_ranges.hpp"
#include "host/index_builder.hpp"
#include "host/label_search.hpp"
#include "host/query.hpp"
#include "host/scan.hpp"
#include "host/search.hpp"
#include "host/tails.hpp"

using namespace flashtrie;

namespace {

// Heap memory of exactly `size` elements, so that a read past the end is seen.
template <typename T>
class Exact {
 public:
  Exact() = default;
  explicit Exact(const std::vector<uint8_t>& bytes, uint64_t spare = 0)
      : size_(bytes.size() / sizeof(T) + spare), data_(new T[size_]()) {
    if (!bytes.empty()) memcpy(data_.get(), bytes.data(), bytes.size() / sizeof(T) * sizeof(T));
  }
  T* data() const { return data_.get(); }
  uint64_t size() const { return size_; }
  void flip(uint64_t bit) {
    if (size_ > 0) data_[bit / (8 * sizeof(T)) % size_] ^= T(1) << (bit % (8 * sizeof(T)));
  }
  void cut() {
    if (size_ == 0) return;
    std::unique_ptr<T[]> shorter(new T[size_ - 1]);
    std::copy_n(data_.get(), size_ - 1, shorter.get());
    data_ = std::move(shorter);
    --size_;
  }

 private:
  uint64_t size_ = 0;
  std::unique_ptr<T[]> data_;
};

using Key = std::vector<uint32_t>;
using Keys = std::map<Key, uint64_t>;

struct Stored {
  Exact<uint64_t> louds, terminal, high_flags, high_bits;
  Exact<uint16_t> label_low;
  uint64_t num_nodes = 0;
  int high_width = 0;

  TrieArrays arrays() const {
    TrieArrays a;
    a.louds = louds.data();
    a.louds_words = louds.size();
    a.terminal = terminal.data();
    a.terminal_words = terminal.size();
    a.label_low = label_low.data();
    a.num_labels = label_low.size();
    a.high_flags = high_flags.data();
    a.high_flag_words = high_flags.size();
    a.high_bits = high_bits.data();
    a.high_words = high_bits.size();
    a.high_width = high_width;
    a.num_nodes = num_nodes;
    return a;
  }
};

std::vector<uint8_t> section(const IndexBuilder& builder, const char* name) {
  std::vector<uint8_t> bytes;
  if (builder.has(name))
    builder.read(name, [&](const uint8_t* data, size_t size) { bytes.insert(bytes.end(), data, data + size); });
  return bytes;
}

std::vector<uint32_t> alphabet() {
  static const std::vector<std::vector<uint32_t>> kinds = {
      {0, 1}, {0, 1, 2, 3, 4, 5, 6, 7}, {65534, 65535, 65536}, {3, 65539, 131075}, {0, 1, 0x7ffffffe, 0x7fffffff}};
  if (below(4) > 0) return kinds[below(kinds.size())];
  std::vector<uint32_t> tokens(300);
  for (uint32_t& token : tokens) token = static_cast<uint32_t>(below(below(2) ? 400 : 1u << 31));
  return tokens;
}

Key random_key(const std::vector<uint32_t>& tokens, uint64_t longest) {
  Key key(below(longest + 1));
  for (uint32_t& token : key) token = tokens[below(tokens.size())];
  return key;
}

// The same keys through two builders, of which one spills at every turn and one is compact: the same arrays.
Stored build(const std::vector<Key>& keys) {
  BuilderOptions options;
  options.temp_directory = "/tmp";
  options.memory = below(2) ? 1 << 12 : 1 << 20;
  options.num_threads = 1 + static_cast<int>(below(3));
  options.value_kind = below(2) ? ValueKind::kUnsigned : ValueKind::kNone;
  options.duplicates = static_cast<Duplicates>(below(6));
  options.is_compact = false;
  IndexBuilder builder(options);
  options.is_compact = true;
  options.memory = 1 << 12;
  IndexBuilder compact(options);
  for (const Key& key : keys) {
    const Exact<uint32_t> tokens(std::vector<uint8_t>(reinterpret_cast<const uint8_t*>(key.data()),
                                                      reinterpret_cast<const uint8_t*>(key.data() + key.size())));
    builder.add(tokens.data(), static_cast<uint32_t>(key.size()), below(100), 0);
    compact.add(tokens.data(), static_cast<uint32_t>(key.size()), below(100), 0);
  }
  builder.finish([] {});
  compact.finish([] {});
  Stored stored;
  stored.num_nodes = builder.counts().num_nodes;
  stored.high_width = builder.counts().high_width;
  stored.louds = Exact<uint64_t>(section(builder, "louds"), kSpareWords);
  stored.terminal = Exact<uint64_t>(section(builder, "terminal"));
  stored.label_low = Exact<uint16_t>(section(builder, "label_low"));
  stored.high_flags = Exact<uint64_t>(section(builder, "high_flags"));
  stored.high_bits = Exact<uint64_t>(section(builder, "label_high"), stored.high_width > 0 ? kSpareWords : 0);
  CHECK(section(builder, "louds") == section(compact, "louds"));
  CHECK(section(builder, "label_high") == section(compact, "label_high"));
  const Exact<uint16_t> delta(section(compact, "label_delta"));
  const Exact<uint64_t> inner(section(compact, "inner_terminal"));
  for (const int threads : {1, 3}) {
    const auto labels = restore_labels(stored.louds.data(), stored.num_nodes, delta.data(), threads);
    CHECK(std::equal(labels.begin(), labels.end(), stored.label_low.data()));
    const auto terminal = restore_terminal(stored.louds.data(), stored.num_nodes, inner.data(), inner.size(), threads);
    CHECK(std::equal(terminal.begin(), terminal.end(), stored.terminal.data()));
  }
  return stored;
}

// The tail store of a builder that cut them off, and the trie without them.
struct StoredTails {
  Stored trie;
  Exact<uint64_t> flags, links, ends;
  Exact<uint8_t> labels;
  TailCounts counts;

  TailArrays arrays() const {
    TailArrays a;
    a.link_flags = flags.data();
    a.link_flag_words = flags.size();
    a.links = links.data();
    a.link_words = links.size();
    while (((counts.num_labels - 1) >> a.link_width) > 0 || a.link_width == 0) ++a.link_width;
    a.num_links = counts.num_links;
    a.ends = ends.data();
    a.end_words = ends.size();
    a.labels = labels.data();
    a.label_size = counts.label_size;
    a.num_labels = counts.num_labels;
    return a;
  }
};

// Cut off and unfolded again it is the same trie; with damaged tails it is refused, or some trie.
void fold(const std::vector<Key>& keys, const Stored& whole) {
  BuilderOptions options;
  options.temp_directory = "/tmp";
  options.memory = below(2) ? 1 << 12 : 1 << 20;
  options.is_compact = false;
  options.tails = below(2) ? Tails::kOn : Tails::kBoth;
  IndexBuilder builder(options);
  for (const Key& key : keys) builder.add(key.data(), static_cast<uint32_t>(key.size()), 0, 0);
  builder.finish([] {});
  builder.use_tails(true);
  StoredTails stored;
  stored.counts = builder.counts().tails;
  if (stored.counts.num_links == 0) return;
  Stored& trie = stored.trie;
  trie.high_width = builder.counts().high_width;
  trie.num_nodes = builder.counts().num_nodes - stored.counts.num_nodes;
  trie.louds = Exact<uint64_t>(section(builder, "louds"), kSpareWords);
  trie.terminal = Exact<uint64_t>(section(builder, "terminal"));
  trie.label_low = Exact<uint16_t>(section(builder, "label_low"));
  trie.high_flags = Exact<uint64_t>(section(builder, "high_flags"));
  trie.high_bits = Exact<uint64_t>(section(builder, "label_high"), trie.high_width > 0 ? kSpareWords : 0);
  stored.flags = Exact<uint64_t>(section(builder, "link_flags"));
  stored.links = Exact<uint64_t>(section(builder, "tail_links"), 1);
  stored.ends = Exact<uint64_t>(section(builder, "tail_ends"));
  stored.labels = Exact<uint8_t>(section(builder, "tail_labels"));
  const WholeTrie unfolded = unfold_tails(trie.arrays(), stored.arrays(), whole.num_nodes);
  CHECK(std::equal(whole.louds.data(), whole.louds.data() + whole.louds.size() - kSpareWords, unfolded.louds.begin()));
  CHECK(std::equal(whole.terminal.data(), whole.terminal.data() + whole.terminal.size(), unfolded.terminal.begin()));
  CHECK(std::equal(whole.label_low.data(), whole.label_low.data() + whole.label_low.size(), unfolded.label_low.begin()));
  CHECK(unfolded.high_flags.size() == whole.high_flags.size());
  CHECK(unfolded.label_high.size() == whole.high_bits.size());
  for (int i = 0; i < 20; ++i) {
    Exact<uint64_t>* words[] = {&stored.flags, &stored.links, &stored.ends, &trie.louds, &trie.high_flags};
    Exact<uint64_t>& target = *words[below(5)];
    const uint64_t bit = source();
    target.flip(bit);
    try {
      unfold_tails(trie.arrays(), stored.arrays(), whole.num_nodes);
    } catch (const InvalidTrie&) {
    }
    target.flip(bit);
  }
}

// All keys of a trie by its own walk, some at a time.
Keys walk(const Trie& trie) {
  Keys found;
  KeyWalk all(trie, 0, {});
  const uint64_t limit = 1 + below(50);
  while (true) {
    const KeyList keys = all.next(limit);
    if (keys.key_ids.empty()) return found;
    CHECK(keys.key_ids.size() <= limit);
    for (size_t i = 0; i < keys.key_ids.size(); ++i) {
      const Key key(keys.tokens.begin() + keys.offsets[i], keys.tokens.begin() + keys.offsets[i + 1]);
      CHECK(found.empty() || found.rbegin()->first < key);
      found.emplace_hint(found.end(), key, keys.key_ids[i]);
    }
  }
}

// Asks everything; the answers must agree with the walk.
void question(const Trie& trie, const Keys& keys, const std::vector<uint32_t>& tokens) {
  CHECK(keys.size() == trie.view().num_keys);
  std::vector<Key> probes;
  for (const auto& [key, id] : keys) {
    if (probes.size() < 200) probes.push_back(key);
  }
  for (int i = 0; i < 60; ++i) {
    Key key = probes.empty() || below(2) ? random_key(tokens, 6) : probes[below(probes.size())];
    if (below(2)) key.push_back(static_cast<uint32_t>(below(2) ? source() : tokens[below(tokens.size())]));
    if (below(8) == 0) key.insert(key.begin() + below(key.size() + 1), kNoToken);
    probes.push_back(key);
  }
  std::vector<uint32_t> flat;
  std::vector<int64_t> offsets = {0};
  for (const Key& key : probes) {
    flat.insert(flat.end(), key.begin(), key.end());
    offsets.push_back(static_cast<int64_t>(flat.size()));
  }
  std::vector<uint32_t> nodes(probes.size());
  std::vector<int64_t> ids(probes.size());
  find_nodes(trie, {flat.data(), offsets.data(), probes.size()}, nodes.data(), 1 + static_cast<int>(below(3)));
  find_key_ids(trie, nodes.data(), nodes.size(), ids.data());
  for (size_t i = 0; i < probes.size(); ++i) {
    const auto at = keys.find(probes[i]);
    CHECK(ids[i] == (at == keys.end() ? -1 : static_cast<int64_t>(at->second)));
    std::vector<uint32_t> lengths, prefix_ids;
    common_prefixes(trie, probes[i].data(), probes[i].size(), lengths, prefix_ids);
    size_t expected = 0;
    for (size_t size = 0; size <= probes[i].size(); ++size)
      expected += keys.count(Key(probes[i].begin(), probes[i].begin() + size));
    CHECK(lengths.size() == expected && prefix_ids.size() == expected);
  }
  std::vector<uint32_t> some;
  for (const auto& [key, id] : keys)
    if (some.size() < 100) some.push_back(static_cast<uint32_t>(id));
  const KeyList listed = key_tokens(trie, some.data(), some.size());
  size_t i = 0;
  for (const auto& [key, id] : keys) {
    if (i == some.size()) break;
    CHECK(std::equal(key.begin(), key.end(), listed.tokens.begin() + listed.offsets[i],
                     listed.tokens.begin() + listed.offsets[i + 1]));
    ++i;
  }
}

// Hits are keys with their own scores, in order; three threads say the same as one.
void search_trie(const Trie& trie, const Keys& keys, const std::vector<uint32_t>& tokens) {
  const uint64_t queries = below(5), steps = below(8), slots = below(below(2) ? 5 : 300);
  const uint64_t size = queries * steps * slots;
  std::vector<uint32_t> grid(size);
  std::vector<float> logprobs(size), factors(steps + 1, 1.0f);
  for (uint32_t& token : grid) token = below(20) == 0 ? static_cast<uint32_t>(source()) : tokens[below(tokens.size())];
  for (float& logprob : logprobs)
    logprob = below(20) == 0 ? -INFINITY : -static_cast<float>(below(64)) / 8 * (below(50) == 0 ? 1e38f : 1.0f);
  SearchParams params{};
  params.token_threshold = below(3) ? -INFINITY : -6;
  params.sequence_threshold = below(3) ? -INFINITY : -9;
  params.beam_width = static_cast<uint32_t>(1 + below(below(2) ? 4 : 500));
  params.num_results = static_cast<uint32_t>(1 + below(200));
  params.padding = below(3) ? kNoToken : tokens[0];
  params.eos = below(3) ? kNoToken : tokens[tokens.size() / 2];
  params.length_factors = factors.data();
  const Grids grids{grid.data(), logprobs.data(), queries, steps, slots};
  CHECK(find_bad_logprob(logprobs.data(), size, 2) == -1);
  const SearchOutput one = search(trie, grids, params, 1), three = search(trie, grids, params, 3);
  CHECK(one.hit_offsets == three.hit_offsets && one.key_ids == three.key_ids && one.tokens == three.tokens);
  CHECK(one.scores == three.scores && one.normalised_scores == three.normalised_scores);
  CHECK(one.hit_offsets.size() == queries + 1);
  for (uint64_t query = 0; query < queries; ++query) {
    const int64_t begin = one.hit_offsets[query], end = one.hit_offsets[query + 1];
    CHECK(end - begin <= static_cast<int64_t>(params.num_results));
    for (int64_t hit = begin; hit < end; ++hit) {
      CHECK(hit == begin || one.normalised_scores[hit - 1] >= one.normalised_scores[hit]);
      const Key key(one.tokens.begin() + one.token_offsets[hit], one.tokens.begin() + one.token_offsets[hit + 1]);
      const auto at = keys.find(key);
      CHECK(at != keys.end() && at->second == one.key_ids[hit]);
    }
  }
}

// Two bits change places: all counts still agree.
void trade(Exact<uint64_t>& bits, uint64_t count) {
  for (int tries = 0; tries < 50; ++tries) {
    const uint64_t i = below(count), j = below(2) ? below(count) : std::min(i + 1, count - 1);
    if (j / 64 >= bits.size() || i / 64 >= bits.size()) return;
    if (test_bit(bits.data(), i) == test_bit(bits.data(), j)) continue;
    bits.flip(i);
    bits.flip(j);
    return;
  }
}

void spoil(Stored& stored) {
  for (uint64_t times = 1 + below(3); times > 0; --times) {
    switch (below(16)) {
      case 0: return stored.louds.cut();
      case 1: return stored.label_low.cut();
      case 2: return stored.terminal.cut();
      case 3: return stored.high_bits.cut();
      case 4: return stored.high_flags.cut();
      case 5: stored.num_nodes += below(3) - 1; break;
      case 6: stored.high_width = static_cast<int>(below(18)); break;
      case 7: stored.label_low.flip(below(16 * stored.num_nodes + 1)); break;
      case 8: stored.terminal.flip(below(stored.num_nodes + 1)); break;
      case 9: stored.high_flags.flip(below(stored.num_nodes + 1)); break;
      case 10: stored.high_bits.flip(source()); break;
      case 11: case 12: case 13: trade(stored.louds, 2 * stored.num_nodes - 1); break;
      case 14: trade(stored.terminal, stored.num_nodes); break;
      default: stored.louds.flip(below(2 * stored.num_nodes)); break;
    }
  }
}

// The compact sections, spoilt: restored to something of the right size, or refused.
void restore_spoilt(const Stored& stored) {
  Exact<uint64_t> louds(std::vector<uint8_t>(8 * ((2 * stored.num_nodes - 1 + 63) / 64)));
  std::copy_n(stored.louds.data(), louds.size(), louds.data());
  for (uint64_t times = below(4); times > 0; --times) louds.flip(below(2 * stored.num_nodes));
  if (below(3) == 0) louds.data()[below(louds.size())] = below(2) ? ~uint64_t(0) : 0;
  if (below(6) == 0) louds.data()[louds.size() - 1] = ~uint64_t(0);
  const Exact<uint16_t> delta(std::vector<uint8_t>(2 * stored.num_nodes));
  const Exact<uint64_t> inner(std::vector<uint8_t>(8 * below(3)));
  try {
    CHECK(restore_labels(louds.data(), stored.num_nodes, delta.data()).size() == stored.num_nodes);
  } catch (const InvalidTrie&) {
  }
  try {
    restore_terminal(louds.data(), stored.num_nodes, inner.data(), inner.size());
  } catch (const InvalidTrie&) {
  }
}

// The selects of this processor against the portable ones, at every node.
void check_child_ranges(const Trie& trie) {
  const uint32_t count = trie.view().num_nodes;
  std::vector<uint32_t> nodes(count);
  for (uint32_t node = 0; node < count; ++node) nodes[node] = node;
  std::vector<ChildRange> portable(count), fast(count);
  find_child_ranges_portable(trie.view(), nodes.data(), count, portable.data());
  find_child_ranges()(trie.view(), nodes.data(), count, fast.data());
  auto same = [](ChildRange a, ChildRange b) { return a.first == b.first && a.last == b.last; };
  CHECK(std::equal(portable.begin(), portable.end(), fast.begin(), same));
}

// Every scan that this processor runs against the portable one, in buffers of exact size.
void check_scan() {
  const uint64_t count = below(below(2) ? 70 : 3000);
  Exact<uint16_t> labels(std::vector<uint8_t>(2 * count));
  std::vector<uint32_t> bitmap(kBitmapWords);
  Sieve sieve;
  sieve.clear();
  for (uint64_t i = 0; i < count; ++i) labels.data()[i] = static_cast<uint16_t>(source());
  const auto propose = [&](uint32_t label) {
    bitmap[label >> 5] |= 1u << (label & 31);
    sieve.add(label);
  };
  for (uint64_t i = 0; i < count; i += 1 + below(20)) propose(labels.data()[i]);
  for (uint64_t i = below(3000); i > 0; --i) propose(below(65536));
  Exact<uint32_t> portable(std::vector<uint8_t>(4 * (count + kScanSlack)));
  Exact<uint32_t> fast(std::vector<uint8_t>(4 * (count + kScanSlack)));
  const uint64_t hits = scan_labels_portable(labels.data(), count, bitmap.data(), sieve, 77, portable.data());
  for (const NamedScan& other : all_scans()) {
    CHECK(other.scan(labels.data(), count, bitmap.data(), sieve, 77, fast.data()) == hits);
    CHECK(std::equal(portable.data(), portable.data() + hits, fast.data()));
  }
}

// Labels searched side by side against those searched one by one, in the trie's own families.
void check_label_search(const Trie& trie) {
  const TrieView& view = trie.view();
  LabelSearch<false> low;
  LabelSearch<true> high;
  std::vector<std::pair<uint32_t, uint32_t>> expected, found;  // place, child
  const auto run = [&] {
    std::array<Match, 2 * kSearchedTogether> matches;
    Match* const end = high.run(view, low.run(view, matches.data()));
    for (const Match* match = matches.data(); match < end; ++match) found.emplace_back(match->beam, match->child);
  };
  for (uint32_t place = 0; place < 300; ++place) {
    const ChildRange range = child_range(view, static_cast<uint32_t>(below(view.num_nodes)));
    if (range.fan_out() == 0) continue;
    uint64_t rank = 0;
    const uint32_t boundary = view.high_width == 0 ? range.last : first_high(view, range, &rank);
    const uint32_t there = range.first + static_cast<uint32_t>(below(range.fan_out()));
    const uint32_t token = label(view, there) + (below(4) == 0);
    const ChildRange part = token <= 0xffff ? ChildRange{range.first, boundary} : ChildRange{boundary, range.last};
    const uint32_t child = find_child(view, range, token);
    if (child != kNoNode) expected.emplace_back(place, child);
    if (part.fan_out() == 0) continue;
    const bool is_full = token <= 0xffff ? low.add(part, token, place)
                                         : high.add(part, token, place, static_cast<uint32_t>(rank) - boundary);
    if (is_full || below(50) == 0) run();
  }
  run();
  std::sort(found.begin(), found.end());
  CHECK(found == expected);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 300;
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 20261130;
  uint64_t refused = 0, accepted = 0;
  for (int round = 0; round < rounds; ++round) {
    source.seed(seed + round);
    const std::vector<uint32_t> tokens = alphabet();
    std::vector<Key> keys;
    const uint64_t count = below(below(4) ? 40 : 3000), longest = below(4) ? 1 + below(6) : 80;
    for (uint64_t i = 0; i < count; ++i) keys.push_back(random_key(tokens, longest));
    Stored stored = build(keys);
    fold(keys, stored);
    {
      const Trie trie(stored.arrays(), 1 + static_cast<int>(below(3)));
      const Keys found = walk(trie);
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
      CHECK(found.size() == keys.size());
      CHECK(std::equal(keys.begin(), keys.end(), found.begin(), [](const Key& k, const auto& f) { return k == f.first; }));
      question(trie, found, tokens);
      check_child_ranges(trie);
  check_label_search(trie);
      for (int i = 0; i < 3; ++i) search_trie(trie, found, tokens);
    }
    restore_spoilt(stored);
    check_scan();
    for (int i = 0; i < 4; ++i) {
      spoil(stored);
      if (stored.num_nodes < 1) break;
      try {
        const Trie trie(stored.arrays(), 1);
        const Keys found = walk(trie);
        question(trie, found, tokens);
        check_child_ranges(trie);
  check_label_search(trie);
        search_trie(trie, found, tokens);
        ++accepted;
      } catch (const InvalidTrie&) {
        ++refused;
      }
    }
  }
  printf("host engine: %d rounds from seed %llu, spoilt tries: %llu refused, %llu sound\n", rounds,
         static_cast<unsigned long long>(seed), static_cast<unsigned long long>(refused),
         static_cast<unsigned long long>(accepted));
  CHECK(rounds < 50 || (refused > 0 && accepted > 0));
}
