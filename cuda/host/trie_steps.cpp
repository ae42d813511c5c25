#include "trie_steps.hpp"

#include <algorithm>
#include <cstring>

namespace flashtrie {

TrieSteps::TrieSteps(const Trie& trie, std::vector<uint32_t> eos, uint32_t vocab_size)
    : trie_(trie), eos_(std::move(eos)), vocab_size_(vocab_size), num_words_((vocab_size + 31) / 32) {}

bool TrieSteps::is_eos(int64_t token) const {
  return token >= 0 && token < vocab_size_ && std::binary_search(eos_.begin(), eos_.end(), static_cast<uint32_t>(token));
}

void TrieSteps::append_children(uint32_t node, std::vector<uint32_t>& tokens, std::vector<uint32_t>& nodes) const {
  const TrieView& view = trie_.view();
  if (node >= view.num_nodes) return;
  const ChildRange range = child_range(view, node);
  for (uint32_t child = range.first; child < range.last; ++child) {
    tokens.push_back(label(view, child));
    nodes.push_back(child);
  }
}

void TrieSteps::append_allowed(uint32_t state, std::vector<uint32_t>& tokens) const {
  const TrieView& view = trie_.view();
  if (state >= view.num_nodes) return;
  const size_t before = tokens.size();
  const ChildRange range = child_range(view, state);
  for (uint32_t child = range.first; child < range.last; ++child) tokens.push_back(label(view, child));
  if (!is_terminal(view, state)) return;
  const size_t middle = tokens.size();
  tokens.insert(tokens.end(), eos_.begin(), eos_.end());
  std::inplace_merge(tokens.begin() + before, tokens.begin() + middle, tokens.end());
  tokens.erase(std::unique(tokens.begin() + before, tokens.end()), tokens.end());
}

void TrieSteps::fill(uint32_t state, uint32_t* row) const {
  memset(row, 0, num_words_ * sizeof(uint32_t));
  const TrieView& view = trie_.view();
  if (state >= view.num_nodes) return;
  const auto set = [row](uint32_t token) { row[token / 32] |= uint32_t(1) << (token % 32); };
  const ChildRange range = child_range(view, state);
  for (uint32_t child = range.first; child < range.last; ++child) set(label(view, child));
  if (is_terminal(view, state))
    for (const uint32_t token : eos_) set(token);
}

uint32_t TrieSteps::advance(uint32_t state, int64_t token) const {
  const TrieView& view = trie_.view();
  if (state >= view.num_nodes || token < 0 || token >= vocab_size_) return kNoNode;
  if (is_terminal(view, state) && is_eos(token)) return ended();
  return find_child(view, child_range(view, state), static_cast<uint32_t>(token));
}

}  // namespace flashtrie
