// Exact and prefix queries over the trie, in batches.
#pragma once
#include <cstdint>
#include <vector>

#include "trie.hpp"

namespace flashtrie {

// Sequences of a batch: sequence i is tokens[offsets[i], offsets[i + 1]).
struct Sequences {
  const uint32_t* tokens = nullptr;
  const int64_t* offsets = nullptr;
  uint64_t count = 0;
};

// Writes for each sequence its node, or kNoNode. Several look-ups run side by side, so that their reads overlap.
void find_nodes(const Trie& trie, const Sequences& sequences, uint32_t* nodes, int num_threads);

// Key ids of the terminal nodes among `nodes`, -1 for the others (and for kNoNode).
void find_key_ids(const Trie& trie, const uint32_t* nodes, uint64_t count, int64_t* key_ids);

// Keys flat, as the queries below give them.
struct KeyList {
  std::vector<uint32_t> key_ids;
  std::vector<int64_t> offsets{0};
  std::vector<uint32_t> tokens;
};

// Walks the keys below a node in lexicographic order, resumable: a depth-first walk with its own stack.
constexpr size_t kWalkTokens = 1 << 20;  // long keys that share their front would fill the memory otherwise

class KeyWalk {
 public:
  // Keys that extend (or are) the sequence `prefix`, which leads to `node`.
  KeyWalk(const Trie& trie, uint32_t node, std::vector<uint32_t> prefix);
  // At most `limit` more keys; fewer where they have kWalkTokens tokens, none only at the end.
  KeyList next(uint64_t limit);

 private:
  struct Frame {
    uint32_t child, last;
  };
  const Trie& trie_;
  std::vector<Frame> stack_;
  std::vector<uint32_t> path_;
  uint32_t root_;
  bool fresh_ = true;
};

// Keys that are prefixes of the sequence (itself included), shortest first: their lengths and key ids.
void common_prefixes(const Trie& trie, const uint32_t* tokens, uint64_t length, std::vector<uint32_t>& lengths,
                     std::vector<uint32_t>& key_ids);

// The tokens of keys, by key id. Throws std::out_of_range on an id that is none.
KeyList key_tokens(const Trie& trie, const uint32_t* key_ids, uint64_t count);

}  // namespace flashtrie
