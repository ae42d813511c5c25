#include "query.hpp"

#include <stdexcept>

#include "threads.hpp"

namespace flashtrie {
namespace {

constexpr int kSideBySide = 16;  // look-ups in flight a thread; hides the latency of a read behind the others

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

// One look-up as a machine of three states, each of which ends where it would wait for memory.
struct LookUp {
  uint64_t sequence;
  const uint32_t* token;
  const uint32_t* end;
  uint32_t node;
  ChildRange range;
  enum { kLine, kLouds, kLabels } state;
};

// Advances by one read; true when the node is final (kNoNode: not found).
inline bool advance(const TrieView& trie, LookUp& l) {
  switch (l.state) {
    case LookUp::kLine: {
      const NodeLine& line = trie.lines[l.node >> 6];
      if (line.wide == kNotWide)
        prefetch(trie.louds + (((uint64_t(l.node) & ~uint64_t(63)) + line.first_child - 1) >> 6));
      else
        prefetch(trie.wide + uint64_t(line.wide) * kWideStride + (l.node & 63));
      l.state = LookUp::kLouds;
      return false;
    }
    case LookUp::kLouds: {
      l.range = child_range(trie, l.node);
      if (l.range.fan_out() == 0) {
        l.node = kNoNode;
        return true;
      }
      prefetch(trie.label_low + l.range.first + l.range.fan_out() / 2);
      l.state = LookUp::kLabels;
      return false;
    }
    case LookUp::kLabels:
    default: {
      l.node = find_child(trie, l.range, *l.token++);
      if (l.node == kNoNode || l.token == l.end) return true;
      prefetch(trie.lines + (l.node >> 6));
      l.state = LookUp::kLine;
      return false;
    }
  }
}

void find_range(const Trie& opened, const Sequences& sequences, uint64_t begin, uint64_t end, uint32_t* nodes) {
  const TrieView& trie = opened.view();
  LookUp flight[kSideBySide];
  int in_flight = 0;
  uint64_t next = begin;
  auto start = [&](LookUp& l) {
    while (next < end) {
      const uint64_t i = next++;
      l.sequence = i;
      l.token = sequences.tokens + sequences.offsets[i];
      l.end = sequences.tokens + sequences.offsets[i + 1];
      if (l.token == l.end) {
        nodes[i] = 0;  // the empty sequence is the root
        continue;
      }
      l.range = opened.root_range(*l.token);
      l.state = LookUp::kLabels;
      prefetch(trie.label_low + l.range.first);
      return true;
    }
    return false;
  };
  while (in_flight < kSideBySide && start(flight[in_flight])) ++in_flight;
  while (in_flight > 0) {
    for (int i = 0; i < in_flight;) {
      if (!advance(trie, flight[i])) {
        ++i;
        continue;
      }
      nodes[flight[i].sequence] = flight[i].node;
      if (start(flight[i]))
        ++i;
      else
        flight[i] = flight[--in_flight];
    }
  }
}

}  // namespace

void find_nodes(const Trie& trie, const Sequences& sequences, uint32_t* nodes, int num_threads) {
  parallel_for(sequences.count, 1 << 12, num_threads, [&](int, uint64_t begin, uint64_t end) {
    find_range(trie, sequences, begin, end, nodes);
  });
}

void find_key_ids(const Trie& trie, const uint32_t* nodes, uint64_t count, int64_t* key_ids) {
  constexpr uint64_t kAhead = 16;
  const TrieView& view = trie.view();
  for (uint64_t i = 0; i < count; ++i) {
    if (i + kAhead < count && nodes[i + kAhead] != kNoNode) prefetch(view.lines + (nodes[i + kAhead] >> 6));
    const uint32_t node = nodes[i];
    key_ids[i] = node != kNoNode && is_terminal(view, node) ? static_cast<int64_t>(key_id(view, node)) : -1;
  }
}

KeyWalk::KeyWalk(const Trie& trie, uint32_t node, std::vector<uint32_t> prefix)
    : trie_(trie), path_(std::move(prefix)), root_(node) {}

KeyList KeyWalk::next(uint64_t limit) {
  const TrieView& trie = trie_.view();
  KeyList found;
  auto visit = [&](uint32_t node) {
    if (is_terminal(trie, node)) {
      found.key_ids.push_back(key_id(trie, node));
      found.tokens.insert(found.tokens.end(), path_.begin(), path_.end());
      found.offsets.push_back(static_cast<int64_t>(found.tokens.size()));
    }
    const ChildRange range = child_range(trie, node);
    stack_.push_back({range.first, range.last});
  };
  if (limit == 0) return found;
  if (fresh_) {
    fresh_ = false;
    visit(root_);
  }
  // The frame on top holds the children still to come of the node that `path_` leads to.
  while (!stack_.empty() && found.key_ids.size() < limit && found.tokens.size() < kWalkTokens) {
    Frame& top = stack_.back();
    if (top.child == top.last) {
      stack_.pop_back();
      if (!stack_.empty()) path_.pop_back();
      continue;
    }
    const uint32_t node = top.child++;
    path_.push_back(label(trie, node));
    visit(node);
  }
  return found;
}

void common_prefixes(const Trie& trie, const uint32_t* tokens, uint64_t length, std::vector<uint32_t>& lengths,
                     std::vector<uint32_t>& key_ids) {
  const TrieView& view = trie.view();
  uint32_t node = 0;
  for (uint64_t at = 0;; ++at) {
    if (is_terminal(view, node)) {
      lengths.push_back(static_cast<uint32_t>(at));
      key_ids.push_back(key_id(view, node));
    }
    if (at == length) return;
    node = find_child(view, node == 0 ? trie.root_range(tokens[at]) : child_range(view, node), tokens[at]);
    if (node == kNoNode) return;
  }
}

namespace {

// First element of [0, count) for which `past` holds; `past` is monotone.
template <typename Past>
uint64_t first_where(uint64_t count, const Past& past) {
  uint64_t low = 0, high = count;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (past(middle))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

uint32_t node_of_key(const TrieView& trie, uint32_t id) {
  const uint64_t num_lines = (uint64_t(trie.num_nodes) + 63) / 64;
  const uint64_t line = first_where(num_lines, [&](uint64_t i) { return trie.lines[i].terminal_rank > id; }) - 1;
  const NodeLine& at = trie.lines[line];
  return static_cast<uint32_t>(line * 64 + select_one64(at.terminal, static_cast<int>(id - at.terminal_rank)));
}

// The node whose child range holds `node` (not the root).
uint32_t parent_of(const TrieView& trie, uint32_t node) {
  const uint64_t num_lines = (uint64_t(trie.num_nodes) + 63) / 64;
  const uint64_t line = first_where(num_lines, [&](uint64_t i) { return trie.lines[i].first_child > node; }) - 1;
  const uint64_t begin = line * 64;
  const uint64_t count = std::min<uint64_t>(64, trie.num_nodes - begin);
  return static_cast<uint32_t>(begin + first_where(count, [&](uint64_t i) {
                                 return child_range(trie, static_cast<uint32_t>(begin + i)).last > node;
                               }));
}

}  // namespace

KeyList key_tokens(const Trie& trie, const uint32_t* key_ids, uint64_t count) {
  const TrieView& view = trie.view();
  KeyList keys;
  std::vector<uint32_t> reversed;
  for (uint64_t i = 0; i < count; ++i) {
    if (key_ids[i] >= view.num_keys) throw std::out_of_range("no such key id");
    reversed.clear();
    for (uint32_t node = node_of_key(view, key_ids[i]); node != 0; node = parent_of(view, node))
      reversed.push_back(label(view, node));
    keys.key_ids.push_back(key_ids[i]);
    keys.tokens.insert(keys.tokens.end(), reversed.rbegin(), reversed.rend());
    keys.offsets.push_back(static_cast<int64_t>(keys.tokens.size()));
  }
  return keys;
}

}  // namespace flashtrie
