#include "masks_compile.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "automaton_walk.hpp"
#include "flashtrie/masks.cuh"
#include "string_sort.hpp"

namespace flashtrie {
namespace {

size_t common_prefix(std::string_view a, std::string_view b) {
  const size_t shorter = std::min(a.size(), b.size());
  size_t i = 0;
  while (i + 8 <= shorter) {
    uint64_t x, y;
    memcpy(&x, a.data() + i, 8);
    memcpy(&y, b.data() + i, 8);
    if (x != y) break;
    i += 8;
  }
  while (i < shorter && a[i] == b[i]) ++i;
  return i;
}

// One pass over the strings from the last to the first. Nodes get their numbers, from the highest down,
// when their subtree is complete; that makes the numbers preorder with ascending bytes. At that moment
// the automaton's state names every token that ends at the node, and each is an entry of the ancestor
// as many levels up as the token has bytes. The ancestor is still open: it is on the path.
class Compiler {
 public:
  // `nodes`: the output list of each node but the root, which makes place for its row; `labels`: the byte into each.
  Compiler(const AutomatonView& automaton, int hop_bits, uint32_t num_nodes, uint32_t* nodes, const uint8_t* labels,
           CompiledMasks& made)
      : outputs_(automaton.outputs), nodes_(nodes), labels_(labels), made_(made), hop_bits_(hop_bits),
        far_hop_(far_hop(hop_bits)), node_(num_nodes), num_nodes_(num_nodes), limit_(num_nodes * uint64_t(6) + 4096) {}

  // `shared` is what each member has in common with the one before it.
  CompileStatus run(const std::vector<std::string_view>& members, const std::vector<uint32_t>& shared, size_t deepest) {
    path_.resize(deepest + 1);
    size_t shared_with_next = 0;
    for (size_t i = members.size(); i-- > 0;) {
      path_[members[i].size()].terminal = true;
      close_down_to(shared[i], shared_with_next, members[i].size(), i == 0);
      shared_with_next = shared[i];
    }
    nodes_[0] = kNoOutput;
    close<true>(0, row_bits(path_[0]), false);
    if (made_.entries.size() > kMaxMaskEntries) return CompileStatus::too_many_entries;
    finish();
    return CompileStatus::ok;
  }

 private:
  static constexpr uint32_t kInline = 6;
  static constexpr uint32_t kSorted = 4;  // rows up to this length are sorted and written without a branch
  static constexpr uint32_t kFew = 2;     // and up to this, nine of ten, in fewer steps
  static constexpr size_t kRankedCount = 128;  // up to here comparing each with each is quickest: no branch to guess
  static constexpr uint32_t kPrefetchDistance = 12;

  // A node on the path from the root, which still collects its entries (token << 32 + hop_bits | target).
  struct Level {
    uint64_t few[kInline] = {};  // the first kSorted are 0 where unused, which no entry is: no target is the root
    uint32_t count = 0;
    uint16_t num_children = 0;  // closed ones
    bool terminal = false;
    std::vector<uint64_t>* more = nullptr;  // all of them, once there are more than kInline; see spill()
  };

  // Below what the member shares with the one after it there is one path: hops are short, and inner nodes single.
  void close_down_to(size_t depth, size_t shared_with_next, size_t size, bool is_first) {
    size_t at = size;
    const size_t fork = std::max(depth, shared_with_next);
    if (size < far_hop_ && size > fork + 1) {
      for (uint32_t bits = kTerminalBit; at > fork + 1; --at, bits = kSingleBit) close<false>(at, bits, true);
      path_[at].num_children = 1;
    }
    for (; at > depth; --at) {
      // The parent has no other child before this one, nor a member, if the member before leaves the path above it.
      const bool begins_path = at > depth + 1 || is_first;
      Level& parent = path_[at - 1];
      close<true>(at, row_bits(path_[at]), begins_path && parent.num_children == 0);
      ++parent.num_children;
    }
  }

  static uint32_t row_bits(const Level& level) {
    return level.terminal ? kTerminalBit : level.num_children == 1 ? kSingleBit : 0;
  }

  // Takes the node's output list out of nodes_, where the walk left it, and puts its row there. The tokens of one byte
  // come last in the list, and are no entries of a parent that is single.
  template <bool kMayBeFar>
  void close(size_t depth, uint32_t bits, bool is_parent_single) {
    Level& level = path_[depth];
    const uint32_t node = --node_;
    const uint32_t first_output = nodes_[node];
    prefetch_outputs(node);
    if (level.count <= kFew)
      flush_two<kMayBeFar>(node, level);
    else if (level.count <= kSorted)
      flush_few<kMayBeFar>(node, level);
    else
      flush_many(node, level);
    nodes_[node] = static_cast<uint32_t>(made_.entries.size()) | bits;
    level.count = 0;
    level.num_children = 0;
    level.terminal = false;
    if (first_output == kNoOutput) return;
    const uint32_t shortest = is_parent_single ? 2 : 1;
    for (const Output* output = outputs_ + first_output;; ++output) {
      const uint32_t length = output->length & ~kLastOutput;
      if (length < shortest) return;
      add(path_[depth - length], static_cast<uint64_t>(output->token) << (32 + hop_bits_) | node);
      if (output->length & kLastOutput) return;
    }
  }

  void prefetch_outputs(uint32_t node) const {
    if (node < kPrefetchDistance) return;
    const uint32_t ahead = nodes_[node - kPrefetchDistance];
    if (ahead != kNoOutput) __builtin_prefetch(outputs_ + ahead);
  }

  void add(Level& level, uint64_t entry) {
    const uint32_t count = level.count++;
    if (count < kInline)
      level.few[count] = entry;
    else
      spill(level, entry);
  }

  // Long rows are few and open at the same time only along one path, so their vectors are kept and reused.
  void spill(Level& level, uint64_t entry) {
    if (level.count == kInline + 1) {
      if (spare_.empty()) spare_.push_back(std::make_unique<std::vector<uint64_t>>());
      level.more = spare_.back().release();
      spare_.pop_back();
      level.more->assign(level.few, level.few + kInline);
    }
    level.more->push_back(entry);
  }

  static void order(uint64_t& larger, uint64_t& smaller) {
    const uint64_t high = std::max(larger, smaller), low = std::min(larger, smaller);
    larger = high;
    smaller = low;
  }

  // Almost every node comes here. What is written before the first entry is rubbish that the next
  // node's entries cover.
  template <bool kMayBeFar>
  void flush_two(uint32_t node, Level& level) {
    uint64_t descending[kFew] = {level.few[0], level.few[1]};
    order(descending[0], descending[1]);
    uint32_t* const end = made_.entries.grow_front(level.count, kSorted, limit_) + level.count;
    end[-1] = packed<kMayBeFar>(node, descending[0]);
    end[-2] = packed<kMayBeFar>(node, descending[1]);
    if (kMayBeFar) collect_far(node, descending, level.count);
    level.few[0] = level.few[1] = 0;
  }

  template <bool kMayBeFar>
  void flush_few(uint32_t node, Level& level) {
    uint64_t a = level.few[0], b = level.few[1], c = level.few[2], d = level.few[3];
    order(a, b);
    order(c, d);
    order(a, c);
    order(b, d);
    order(b, c);
    uint32_t* const end = made_.entries.grow_front(level.count, kSorted, limit_) + level.count;
    end[-1] = packed<kMayBeFar>(node, a);
    end[-2] = packed<kMayBeFar>(node, b);
    end[-3] = packed<kMayBeFar>(node, c);
    end[-4] = packed<kMayBeFar>(node, d);
    if (kMayBeFar) {
      const uint64_t descending[kSorted] = {a, b, c, d};
      collect_far(node, descending, level.count);
    }
    level.few[0] = level.few[1] = level.few[2] = level.few[3] = 0;
  }

  void flush_many(uint32_t node, Level& level) {
    const size_t count = level.count;
    uint64_t* const entries = level.more != nullptr ? level.more->data() : level.few;
    if (count <= kRankedCount)
      sort_by_rank(entries, count);
    else
      sort_long(entries, count);
    uint32_t* const end = made_.entries.grow_front(count, kSorted, limit_) + count;
    for (size_t i = 0; i < count; ++i) end[-1 - static_cast<ptrdiff_t>(i)] = packed<true>(node, entries[i]);
    collect_far(node, entries, count);
    if (level.more != nullptr) {
      spare_.emplace_back(level.more);
      level.more = nullptr;
    }
    for (uint64_t& entry : level.few) entry = 0;
  }

  // Descending.
  void sort_by_rank(uint64_t* entries, size_t count) const {
    int32_t tokens[kRankedCount];
    uint64_t given[kRankedCount];
    for (size_t i = 0; i < count; ++i) {
      given[i] = entries[i];
      tokens[i] = static_cast<int32_t>(entries[i] >> (32 + hop_bits_));
    }
    for (size_t i = 0; i < count; ++i) {
      int32_t num_larger = 0;
      for (size_t j = 0; j < count; ++j) num_larger += tokens[j] > tokens[i];
      entries[num_larger] = given[i];
    }
  }

  // Descending; a token leads to one node, so the tokens alone decide.
  void sort_long(uint64_t* entries, size_t count) {
    if (scratch_.size() < 2 * count) scratch_.resize(2 * count);
    for (size_t i = 0; i < count; ++i) scratch_[i].key = ~entries[i];
    const int first_digit = (32 + hop_bits_) / 8;
    radix_sort(scratch_.data(), scratch_.data() + count, count, first_digit, 8);
    for (size_t i = 0; i < count; ++i) entries[i] = ~scratch_[i].key;
  }

  template <bool kMayBeFar>
  uint32_t packed(uint32_t node, uint64_t entry) const {
    const uint32_t hop = static_cast<uint32_t>(entry) - node;
    return static_cast<uint32_t>(entry >> 32) + (kMayBeFar ? std::min(hop, far_hop_) : hop);
  }

  // Entries whose hop does not fit, the last one first. Entry numbers count from the end while the
  // array grows backwards; finish() turns them round.
  void collect_far(uint32_t node, const uint64_t* descending, size_t count) {
    if (node + far_hop_ >= num_nodes_) return;
    const uint64_t before = made_.entries.size() - count;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t target = static_cast<uint32_t>(descending[i]);
      if (target - node >= far_hop_) far_.push_back({before + 1 + i, target});
    }
  }

  void finish() {
    const uint32_t num_entries = static_cast<uint32_t>(made_.entries.size());
    const size_t num_halves = (num_nodes_ + size_t(2)) * kRowHalves;
    uint16_t* const rows = made_.rows.grow_front(num_halves, 0, num_halves);
    for (uint32_t node = 0; node < num_nodes_; ++node) {
      const uint32_t from_end = nodes_[node] & kEntryBits, bits = nodes_[node] & ~kEntryBits;
      const uint32_t next = node + 1 < num_nodes_ ? nodes_[node + 1] & kEntryBits : 0;
      put_row(rows, node, (num_entries - from_end) | bits, from_end - next,
              bits & kSingleBit ? labels_[node + 1] : uint8_t(0));
    }
    for (uint32_t end = 0; end < 2; ++end) put_row(rows, num_nodes_ + end, num_entries, 0, 0);
    for (size_t i = far_.size(); i-- > 0;) {
      made_.far_entries.push_back(num_entries - static_cast<uint32_t>(far_[i].from_end));
      made_.far_targets.push_back(far_[i].target);
    }
  }

  struct Sortable {
    uint64_t key;
  };
  struct Far {
    uint64_t from_end;
    uint32_t target;
  };

  const Output* const outputs_;
  uint32_t* const nodes_;
  const uint8_t* const labels_;
  CompiledMasks& made_;
  const int hop_bits_;
  const uint32_t far_hop_;
  std::vector<Level> path_;
  std::vector<std::unique_ptr<std::vector<uint64_t>>> spare_;
  std::vector<Far> far_;
  std::vector<Sortable> scratch_;
  uint32_t node_;
  const uint32_t num_nodes_;
  const uint64_t limit_;
};

void append_json_escaped(std::string_view text, std::vector<char>& out) {
  static const char* const kHex = "0123456789abcdef";
  for (const char c : text) {
    const uint8_t byte = static_cast<uint8_t>(c);
    const char* const short_form = byte == '"' ? "\\\"" : byte == '\\' ? "\\\\" : byte == '\n' ? "\\n" : byte == '\r' ? "\\r"
                                   : byte == '\t' ? "\\t" : byte == '\b' ? "\\b" : byte == '\f' ? "\\f" : nullptr;
    if (short_form != nullptr) {
      out.insert(out.end(), short_form, short_form + 2);
    } else if (byte < 0x20) {
      const char escape[6] = {'\\', 'u', '0', '0', kHex[byte >> 4], kHex[byte & 15]};
      out.insert(out.end(), escape, escape + 6);
    } else {
      out.push_back(c);
    }
  }
}

}  // namespace

void append_spelled(std::string_view text, const Spelling& spelling, std::vector<char>& out) {
  if (spelling.prefix_space) out.push_back(' ');
  if (!spelling.json_quoted) {
    out.insert(out.end(), text.begin(), text.end());
    return;
  }
  out.push_back('"');
  append_json_escaped(text, out);
  out.push_back('"');
}

int hop_bits_for(uint32_t vocab_size) {
  int token_bits = 1;
  while (token_bits < 24 && vocab_size > uint32_t(1) << token_bits) ++token_bits;
  return 32 - token_bits;
}

CompileStatus compile_masks(const AutomatonView& automaton, uint32_t vocab_size, std::vector<std::string_view>& members,
                            CompiledMasks& made) {
  sort_unique(members);
  made.num_members = members.size();
  std::vector<uint32_t> shared(members.size());  // bytes in common with the member before
  uint64_t num_nodes = 1;
  size_t deepest = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    shared[i] = i > 0 ? static_cast<uint32_t>(common_prefix(members[i - 1], members[i])) : 0;
    num_nodes += members[i].size() - shared[i];
    deepest = std::max(deepest, members[i].size());
  }
  if (num_nodes > kMaxMaskNodes) return CompileStatus::too_many_nodes;
  const std::unique_ptr<uint32_t[]> nodes(new uint32_t[num_nodes]);  // not initialised, as large arrays should not be
  const std::unique_ptr<uint8_t[]> labels(new uint8_t[num_nodes]);
  walk_automaton(automaton, members, shared, deepest, nodes.get(), labels.get());
  return Compiler(automaton, hop_bits_for(vocab_size), static_cast<uint32_t>(num_nodes), nodes.get(), labels.get(), made)
      .run(members, shared, deepest);
}

}  // namespace flashtrie
