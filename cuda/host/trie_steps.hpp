// One step down the token trie for a batch of nodes: what may come next, and where a token leads.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "trie.hpp"

namespace flashtrie {

// The trie with the tokens that may follow a whole key. States are nodes, and ended() behind an end token.
class TrieSteps {
 public:
  // `eos` ascending, below vocab_size.
  TrieSteps(const Trie& trie, std::vector<uint32_t> eos, uint32_t vocab_size);

  uint32_t num_words() const { return num_words_; }
  uint32_t vocab_size() const { return vocab_size_; }
  uint32_t ended() const { return trie_.view().num_nodes; }

  // Tokens and nodes of the children, in ascending order of the tokens.
  void append_children(uint32_t node, std::vector<uint32_t>& tokens, std::vector<uint32_t>& nodes) const;

  // Allowed tokens of a state, ascending: its children's, and the end tokens where a key ends.
  void append_allowed(uint32_t state, std::vector<uint32_t>& tokens) const;

  // The same as a row of num_words() mask words.
  void fill(uint32_t state, uint32_t* row) const;

  // The state after a token, or kNoNode. At the end of a key an end token ends, even if it labels a child too.
  uint32_t advance(uint32_t state, int64_t token) const;

 private:
  bool is_eos(int64_t token) const;

  const Trie& trie_;
  std::vector<uint32_t> eos_;
  uint32_t vocab_size_;
  uint32_t num_words_;
};

}  // namespace flashtrie
