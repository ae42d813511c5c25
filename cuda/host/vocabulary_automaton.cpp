#include "vocabulary_automaton.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>

namespace flashtrie {
namespace {

constexpr uint32_t kBlock = 256;         // a state's children lie in one aligned block of slots
constexpr uint32_t kSearchedBlocks = 32;  // how many of the youngest blocks with room a state tries before a new one

// A state that waits for its children: the tokens that pass through it are sorted[first, last).
struct Pending {
  uint32_t slot, first, last, depth;
};

class Builder {
 public:
  Builder(const uint32_t* tokens, const uint64_t* begins, const uint8_t* bytes, uint64_t num_tokens) {
    sorted_.reserve(num_tokens);
    for (uint64_t i = 0; i < num_tokens; ++i) {
      const std::string_view text(reinterpret_cast<const char*>(bytes) + begins[i], begins[i + 1] - begins[i]);
      if (!text.empty()) sorted_.push_back({text, tokens[i]});
    }
    std::sort(sorted_.begin(), sorted_.end(), [](const Token& a, const Token& b) {
      const int order = a.text.compare(b.text);  // bytes as unsigned, as char_traits<char> promises
      return order != 0 ? order < 0 : a.id < b.id;
    });
  }

  VocabularyAutomaton build() {
    add_block();
    take(0, kNoState);
    std::vector<Pending> queue;
    queue.push_back({0, 0, static_cast<uint32_t>(sorted_.size()), 0});
    for (size_t at = 0; at < queue.size(); ++at) expand(queue[at], queue);
    return std::move(made_);
  }

 private:
  struct Token {
    std::string_view text;
    uint32_t id;
  };

  // Level order, so whatever a state's failure link names is complete when the state is expanded.
  void expand(const Pending state, std::vector<Pending>& queue) {
    uint32_t first = state.first;
    while (first < state.last && sorted_[first].text.size() == state.depth) ++first;  // tokens that end here
    set_outputs(state, first);
    children_.clear();
    starts_.clear();
    for (uint32_t i = first; i < state.last;) {
      const uint8_t byte = static_cast<uint8_t>(sorted_[i].text[state.depth]);
      children_.push_back(byte);
      starts_.push_back(i);
      i = end_of_child(i, state.last, state.depth, byte);
    }
    if (children_.empty()) return;  // base stays 0: no slot's check names a state without children
    starts_.push_back(state.last);
    const uint32_t base = find_base();
    made_.slots[state.slot].base = base;
    for (size_t c = 0; c < children_.size(); ++c) {
      const uint32_t slot = base ^ children_[c];
      take(slot, state.slot);
      made_.slots[slot].fail = failure(state.slot, children_[c]);
      queue.push_back({slot, starts_[c], starts_[c + 1], state.depth + 1});
    }
  }

  uint32_t end_of_child(uint32_t first, uint32_t last, uint32_t depth, uint8_t byte) const {
    const auto end = std::upper_bound(
        sorted_.begin() + first, sorted_.begin() + last, byte,
        [depth](uint8_t wanted, const Token& token) { return wanted < static_cast<uint8_t>(token.text[depth]); });
    return static_cast<uint32_t>(end - sorted_.begin());
  }

  uint32_t failure(uint32_t parent, uint8_t byte) const {
    if (parent == 0) return 0;
    return made_.view().step(made_.slots[parent].fail, byte);
  }

  // A state without a token of its own shares the list of its failure state.
  void set_outputs(const Pending& state, uint32_t own_end) {
    AutomatonSlot& slot = made_.slots[state.slot];
    const uint32_t inherited = state.slot == 0 ? kNoOutput : made_.slots[slot.fail].output;
    if (own_end == state.first) {
      slot.output = inherited;
      return;
    }
    slot.output = static_cast<uint32_t>(made_.outputs.size());
    for (uint32_t i = state.first; i < own_end; ++i) made_.outputs.push_back({sorted_[i].id, state.depth});
    for (uint32_t i = inherited; i != kNoOutput; ++i) {
      const Output other = made_.outputs[i];
      made_.outputs.push_back({other.token, other.length & ~kLastOutput});
      if (other.length & kLastOutput) break;
    }
    made_.outputs.back().length |= kLastOutput;
  }

  // A base under which all of children_ fall on free slots.
  uint32_t find_base() {
    size_t tried = 0;
    for (size_t at = open_.size(); at-- > 0 && tried < kSearchedBlocks; ++tried) {
      const uint32_t block = open_[at];
      if (free_in_block_[block] < children_.size()) continue;
      if (const uint32_t base = base_in_block(block); base != kNoState) return base;
    }
    const uint32_t block = add_block();
    return block * kBlock;
  }

  uint32_t base_in_block(uint32_t block) const {
    const uint32_t start = block * kBlock;
    for (uint32_t low = 0; low < kBlock; ++low) {
      if (made_.slots[start + (low ^ children_[0])].check != kNoState) continue;
      if (start + (low ^ children_[0]) == 0) continue;  // the root's own slot
      const bool fits = std::all_of(children_.begin(), children_.end(), [&](uint8_t byte) {
        return start + (low ^ byte) != 0 && made_.slots[start + (low ^ byte)].check == kNoState;
      });
      if (fits) return start + low;
    }
    return kNoState;
  }

  uint32_t add_block() {
    const uint32_t block = static_cast<uint32_t>(made_.slots.size() / kBlock);
    made_.slots.resize(made_.slots.size() + kBlock, AutomatonSlot{0, kNoState, 0, kNoOutput});
    free_in_block_.push_back(kBlock);
    open_.push_back(block);
    return block;
  }

  void take(uint32_t slot, uint32_t parent) {
    made_.slots[slot].check = parent;
    const uint32_t block = slot / kBlock;
    if (--free_in_block_[block] == 0) open_.erase(std::find(open_.begin(), open_.end(), block));
  }

  std::vector<Token> sorted_;
  VocabularyAutomaton made_;
  std::vector<uint8_t> children_;
  std::vector<uint32_t> starts_;
  std::vector<uint32_t> open_;           // blocks with a free slot
  std::vector<uint16_t> free_in_block_;
};

}  // namespace

VocabularyAutomaton build_automaton(const uint32_t* tokens, const uint64_t* begins, const uint8_t* bytes,
                                    uint64_t num_tokens) {
  return Builder(tokens, begins, bytes, num_tokens).build();
}

}  // namespace flashtrie
