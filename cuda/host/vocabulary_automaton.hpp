// The Aho-Corasick automaton of a vocabulary: which tokens end here, for every place of every text.
// It depends on the tokenizer alone, so it is built once and kept on disk.
#pragma once
#include <cstdint>
#include <vector>

namespace flashtrie {

constexpr uint32_t kNoState = 0xffffffffu;
constexpr uint32_t kNoOutput = 0xffffffffu;
constexpr uint32_t kLastOutput = 0x80000000u;  // in Output::length: the list ends with this entry

// One state: a slot of a double array, so that a step costs one 16-byte read when it succeeds.
// The child by byte c of state s is slot `base ^ c` if that slot's `check` is s.
struct AutomatonSlot {
  uint32_t base;
  uint32_t check;   // the parent's slot; kNoState where the slot is free (and in the root's)
  uint32_t fail;    // the state of the longest proper suffix that is one; the root's is the root
  uint32_t output;  // first of the tokens that end here, longest first; kNoOutput where none does
};
static_assert(sizeof(AutomatonSlot) == 16);

struct Output {
  uint32_t token;
  uint32_t length;  // bytes of the token, with kLastOutput on the last of a list
};
static_assert(sizeof(Output) == 8);

struct AutomatonView {
  const AutomatonSlot* slots;  // root 0; a multiple of 256, so no byte leads outside
  const Output* outputs;
  uint64_t num_slots;
  uint64_t num_outputs;

  uint32_t step(uint32_t state, uint8_t byte) const {
    for (;;) {
      const uint32_t next = slots[state].base ^ byte;
      if (slots[next].check == state) return next;
      if (state == 0) return 0;
      state = slots[state].fail;
    }
  }
};

struct VocabularyAutomaton {
  std::vector<AutomatonSlot> slots;
  std::vector<Output> outputs;
  AutomatonView view() const { return {slots.data(), outputs.data(), slots.size(), outputs.size()}; }
};

// `tokens` are the ids that count as text, `begins` where the bytes of each begin in `bytes` (one more
// entry than tokens). A token without bytes is left out. Ids below 2^31, lengths below 2^31.
VocabularyAutomaton build_automaton(const uint32_t* tokens, const uint64_t* begins, const uint8_t* bytes,
                                    uint64_t num_tokens);

}  // namespace flashtrie
