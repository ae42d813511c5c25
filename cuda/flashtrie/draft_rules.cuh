// What a draft tree may be held to: a token trie, or token masks. The C++ engine and the kernels ask both alike:
//   legal(state)             which tokens may follow; a state that is none (kNoNode) has none
//   count()                  how many there are, numbered from 0 in no particular order, each token once
//   token(legal, number)     one of them
//   state(legal, number)     where it leads
#pragma once
#include "draft.cuh"
#include "masks.cuh"
#include "trie.cuh"

namespace flashtrie {

// The children of a trie node, and where a key ends the end token, behind which there is no node.
struct TrieRules {
  TrieView trie;
  int64_t end_token;  // -1: keys end without a token

  struct Legal {
    ChildRange children;
    uint32_t num_ends;
    FT_HD uint32_t count() const { return children.fan_out() + num_ends; }
  };

  FT_HD Legal legal(uint32_t state) const {
    if (state == kNoNode) return {{0, 0}, 0};
    const ChildRange children = child_range(trie, state);
    return {children, end_token >= 0 && is_terminal(trie, state) && !has_label(children) ? 1u : 0u};
  }

  FT_HD uint32_t token(const Legal& legal, uint32_t number) const {
    return number < legal.children.fan_out() ? label(trie, legal.children.first + number)
                                             : static_cast<uint32_t>(end_token);
  }

  FT_HD uint32_t state(const Legal& legal, uint32_t number) const {
    return number < legal.children.fan_out() ? legal.children.first + number : kNoNode;
  }

 private:
  // Whether some child has the end token for a label; it then keeps its own state.
  FT_HD bool has_label(const ChildRange& children) const {
    uint32_t low = children.first, high = children.last;
    while (low < high) {
      const uint32_t middle = low + ((high - low) >> 1);
      if (label(trie, middle) < static_cast<uint32_t>(end_token))
        low = middle + 1;
      else
        high = middle;
    }
    return low < children.last && label(trie, low) == static_cast<uint32_t>(end_token);
  }
};

// The allowed tokens of a masks' state, and where a member ends the end-of-sequence ids, which are never among them.
struct MaskRules {
  MaskView masks;

  struct Legal {
    uint32_t node;
    EntryRange range;
    ByteRange bytes;
    uint32_t num_ends;
    FT_HD uint32_t num_inner() const { return range.count() + bytes.count(); }  // of those that lead to a node
    FT_HD uint32_t count() const { return num_inner() + num_ends; }
  };

  FT_HD Legal legal(uint32_t state) const {
    if (state >= masks.num_nodes) return {state, {0, 0, false, false, 0}, {0, 0}, 0};
    const EntryRange range = entry_range(masks, state);
    return {state, range, byte_range(masks, range), range.terminal ? masks.num_eos : 0};
  }

  FT_HD uint32_t token(const Legal& legal, uint32_t number) const {
    const uint32_t num_entries = legal.range.count(), num_inner = legal.num_inner();
    if (number < num_entries) return entry_token(masks, legal.range.first + number);
    return number < num_inner ? masks.bytes.tokens[legal.bytes.first + number - num_entries] : masks.eos[number - num_inner];
  }

  FT_HD uint32_t state(const Legal& legal, uint32_t number) const {
    if (number < legal.range.count()) return entry_target(masks, legal.node, legal.range.first + number);
    return number < legal.num_inner() ? legal.node + 1 : masks.num_nodes;
  }
};

// A drafter's vocabulary of its own: its id for each token, kNoNode for those it lacks. Null: ids are tokens.
struct DraftIds {
  const uint32_t* of_token;  // [num_tokens]
  uint32_t num_tokens;

  FT_HD uint32_t operator()(uint32_t token) const {
    if (of_token == nullptr) return token;
    return token < num_tokens ? of_token[token] : kNoNode;
  }
};

// What the tree must not leave.
template <typename Rules>
struct DraftConstraint {
  Rules rules;
  DraftIds ids;
  const uint32_t* start_states;  // [B], or null: state 0, the root
  int32_t renormalise;           // over each node's legal tokens, instead of the whole vocabulary
};

}  // namespace flashtrie
