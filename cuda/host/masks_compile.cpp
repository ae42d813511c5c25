#include "masks_compile.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

#include "flashtrie/masks.cuh"

namespace flashtrie {
namespace {

// First eight bytes as a number in byte order, so that most comparisons read no string.
uint64_t head_of(std::string_view text) {
  uint64_t head = 0;
  for (size_t i = 0; i < 8; ++i) head = head << 8 | (i < text.size() ? static_cast<uint8_t>(text[i]) : 0);
  return head;
}

struct Sortable {
  uint64_t head;
  std::string_view text;
  bool operator<(const Sortable& other) const {
    return head != other.head ? head < other.head : text < other.text;
  }
};

void sort_unique(std::vector<std::string_view>& members) {
  std::vector<Sortable> sortable;
  sortable.reserve(members.size());
  for (const std::string_view text : members) sortable.push_back({head_of(text), text});
  if (!std::is_sorted(sortable.begin(), sortable.end())) std::sort(sortable.begin(), sortable.end());
  members.clear();
  for (const Sortable& one : sortable)
    if (members.empty() || members.back() != one.text) members.push_back(one.text);
}

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
  Compiler(const AutomatonView& automaton, int hop_bits, CompiledMasks& made)
      : automaton_(automaton), made_(made), hop_bits_(hop_bits), far_hop_(far_hop(hop_bits)) {}

  CompileStatus run(const std::vector<std::string_view>& members) {
    const size_t num_members = members.size();
    std::vector<uint32_t> shared(num_members);  // bytes in common with the next member
    uint64_t num_nodes = 1;
    size_t deepest = 0;
    for (size_t i = 0; i < num_members; ++i) {
      shared[i] = i + 1 < num_members ? static_cast<uint32_t>(common_prefix(members[i], members[i + 1])) : 0;
      num_nodes += members[i].size() - shared[i];
      deepest = std::max(deepest, members[i].size());
    }
    if (num_nodes > kMaxMaskNodes) return CompileStatus::too_many_nodes;
    reserve(num_nodes, deepest);

    for (size_t i = num_members; i-- > 0;) {
      const std::string_view member = members[i];
      if (i + 1 < num_members) close_down_to(shared[i]);
      for (size_t depth = shared[i]; depth < member.size(); ++depth) open(static_cast<uint8_t>(member[depth]));
      path_[depth_].terminal = true;
    }
    close_down_to(0);
    close();
    if (made_.entries.size() > kMaxMaskEntries) return CompileStatus::too_many_entries;
    finish(num_nodes);
    return CompileStatus::ok;
  }

 private:
  static constexpr size_t kInline = 4;

  // A node on the path from the root, which still collects its entries (token << 32 | target).
  struct Level {
    uint64_t few[kInline] = {};     // unused ones are 0, which no entry is: a target is never the root
    std::vector<uint64_t> more;     // all of them, once there are more than kInline
    uint32_t num_few = 0;
    uint32_t state = 0;
    uint32_t output = kNoOutput;
    uint32_t num_children = 0;
    uint8_t label = 0;
    bool terminal = false;

    void add(uint64_t entry) {
      if (num_few < kInline) {
        few[num_few++] = entry;
        return;
      }
      if (more.empty()) more.assign(few, few + kInline);
      more.push_back(entry);
    }
  };

  void reserve(uint64_t num_nodes, size_t deepest) {
    next_node_ = num_nodes_ = static_cast<uint32_t>(num_nodes);
    first_guess_ = num_nodes * 6 + 4096;
    made_.rows.resize(num_nodes + 2);
    made_.labels.resize(num_nodes);
    made_.single.assign((num_nodes + 63) / 64, 0);
    path_.resize(deepest + 1);
  }

  void open(uint8_t byte) {
    const uint32_t state = automaton_.step(path_[depth_].state, byte);
    ++path_[depth_].num_children;
    Level& level = path_[++depth_];
    level.state = state;
    level.output = automaton_.slots[state].output;
    level.num_children = 0;
    level.label = byte;
    level.terminal = false;
  }

  void close_down_to(size_t depth) {
    while (depth_ > depth) {
      close();
      --depth_;
    }
  }

  void close() {
    Level& level = path_[depth_];
    const uint32_t node = --next_node_;
    made_.labels[node] = level.label;
    const uint64_t single = level.num_children == 1 && !level.terminal;
    made_.single[node >> 6] |= single << (node & 63);
    flush(node, level);
    if (level.output == kNoOutput) return;
    for (const Output* output = automaton_.outputs + level.output;; ++output) {
      const uint32_t length = output->length & ~kLastOutput;
      path_[depth_ - length].add(static_cast<uint64_t>(output->token) << 32 | node);
      if (output->length & kLastOutput) break;
    }
  }

  // Entry numbers count from the end while the arrays grow backwards; finish() turns them round.
  void flush(uint32_t node, Level& level) {
    if (level.more.empty())
      flush_few(node, level);
    else
      flush_more(node, level);
    made_.rows[node] = static_cast<uint32_t>(made_.entries.size()) | (level.terminal ? kTerminalBit : 0);
  }

  static void order(uint64_t& larger, uint64_t& smaller) {
    const uint64_t high = std::max(larger, smaller), low = std::min(larger, smaller);
    larger = high;
    smaller = low;
  }

  // Almost every node comes here: no branch on how many entries there are. The slots before the
  // first entry get rubbish, which the next node's entries cover.
  void flush_few(uint32_t node, Level& level) {
    uint64_t* const few = level.few;
    order(few[0], few[1]);
    order(few[2], few[3]);
    order(few[0], few[2]);
    order(few[1], few[3]);
    order(few[1], few[2]);
    const ptrdiff_t count = level.num_few;
    uint32_t* const end = made_.entries.grow_front(count, kInline, first_guess_) + count;
    for (ptrdiff_t i = 0; i < static_cast<ptrdiff_t>(kInline); ++i) end[-1 - i] = packed(node, few[i]);
    if (node + far_hop_ < num_nodes_) collect_far(node, few, level.num_few);
    memset(few, 0, sizeof level.few);
    level.num_few = 0;
  }

  void flush_more(uint32_t node, Level& level) {
    std::vector<uint64_t>& entries = level.more;
    const size_t count = entries.size();
    std::sort(entries.begin(), entries.end(), std::greater<>());
    uint32_t* const made = made_.entries.grow_front(count, kInline, first_guess_);
    for (size_t i = 0; i < count; ++i) made[count - 1 - i] = packed(node, entries[i]);
    if (node + far_hop_ < num_nodes_) collect_far(node, entries.data(), count);
    entries.clear();
    memset(level.few, 0, sizeof level.few);
    level.num_few = 0;
  }

  uint32_t packed(uint32_t node, uint64_t entry) const {
    const uint32_t hop = static_cast<uint32_t>(entry) - node;
    return static_cast<uint32_t>(entry >> 32) << hop_bits_ | std::min(hop, far_hop_);
  }

  // Entries whose hop does not fit, the last one first.
  void collect_far(uint32_t node, const uint64_t* descending, size_t count) {
    const uint64_t before = made_.entries.size() - count;
    for (size_t i = 0; i < count; ++i) {
      const uint32_t target = static_cast<uint32_t>(descending[i]);
      if (target - node >= far_hop_) far_.push_back({before + 1 + i, target});
    }
  }

  void finish(uint64_t num_nodes) {
    const uint32_t num_entries = static_cast<uint32_t>(made_.entries.size());
    for (uint64_t node = 0; node < num_nodes; ++node) {
      const uint32_t row = made_.rows[node];
      made_.rows[node] = (num_entries - (row & ~kTerminalBit)) | (row & kTerminalBit);
    }
    made_.rows[num_nodes] = made_.rows[num_nodes + 1] = num_entries;
    for (size_t i = far_.size(); i-- > 0;) {
      made_.far_entries.push_back(num_entries - static_cast<uint32_t>(far_[i].from_end));
      made_.far_targets.push_back(far_[i].target);
    }
  }

  struct Far {
    uint64_t from_end;
    uint32_t target;
  };

  const AutomatonView& automaton_;
  CompiledMasks& made_;
  const int hop_bits_;
  const uint32_t far_hop_;
  std::vector<Level> path_;
  std::vector<Far> far_;
  size_t depth_ = 0;
  uint32_t next_node_ = 0;
  uint32_t num_nodes_ = 0;
  uint64_t first_guess_ = 0;
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
  return Compiler(automaton, hop_bits_for(vocab_size), made).run(members);
}

}  // namespace flashtrie
