// Token masks without Python, to be run under ASan and UBSan: random sets over a random vocabulary, and batches of rows
// that follow random states, by `fill` and by `share`, of any count, every row compared with one filled anew.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "fuzz.hpp"
#include "host/mask_rows.hpp"
#include "host/masks_compile.hpp"
#include "host/vocabulary_automaton.hpp"

using namespace flashtrie;

namespace {

std::string random_text(size_t most, unsigned num_bytes) {
  std::string text(1 + below(most), '\0');
  for (char& byte : text) byte = static_cast<char>(below(num_bytes));
  return text;
}

// Every byte as a token, longer tokens besides; the ids behind them end an answer.
struct World {
  std::vector<uint32_t> byte_begins, byte_tokens, eos;
  VocabularyAutomaton automaton;
  CompiledMasks made;
  uint32_t vocab_size;

  explicit World(unsigned num_bytes) {
    std::vector<uint32_t> ids;
    std::vector<uint64_t> begins{0};
    std::string bytes;
    for (uint32_t id = 0; id < 256 + below(400); ++id) {
      bytes += id < 256 ? std::string(1, static_cast<char>(id)) : random_text(4, num_bytes) + static_cast<char>(below(num_bytes));
      ids.push_back(id);
      begins.push_back(bytes.size());
    }
    automaton = build_automaton(ids.data(), begins.data(), reinterpret_cast<const uint8_t*>(bytes.data()), ids.size());
    for (uint64_t i = 0, count = 1 + below(8); i < count; ++i) eos.push_back(static_cast<uint32_t>(ids.size() + i));
    vocab_size = static_cast<uint32_t>(eos.back() + 1 + (below(2) ? below(100'000) : 0));
    for (uint32_t byte = 0; byte <= 256; ++byte) byte_begins.push_back(byte);
    for (uint32_t byte = 0; byte < 256; ++byte) byte_tokens.push_back(byte);
    std::vector<std::string> members;
    for (uint64_t i = 0, count = 1 + below(1500); i < count; ++i) {
      members.push_back(random_text(5, num_bytes));
      members.back()[0] &= 15;  // so that nodes below the root have long lists
    }
    std::vector<std::string_view> views(members.begin(), members.end());
    CHECK(compile_masks(automaton.view(), vocab_size, views, made) == CompileStatus::ok);
  }

  MaskView view() const {
    const uint64_t num_nodes = made.rows.size() / kRowHalves - 2;
    return {made.rows.begin(), made.entries.begin(), made.far_entries.data(), made.far_targets.data(), eos.data(),
            {byte_begins.data(), byte_tokens.data()},
            static_cast<uint32_t>(num_nodes), static_cast<uint32_t>(made.far_entries.size()),
            static_cast<uint32_t>(eos.size()), vocab_size, hop_bits_for(vocab_size)};
  }
};

void follow_states(const MaskSet& set, size_t num_rows) {
  MaskRows rows(set, num_rows);
  const size_t num_words = set.num_words();
  std::vector<uint32_t> want(num_words), heavy{0};
  for (uint32_t node = 0; node < set.ended(); ++node)
    if (set.count_allowed(node) > 32) heavy.push_back(node);
  for (int step = 0; step < 30; ++step) {
    const size_t count = below(3) ? below(num_rows + 1) : num_rows;
    std::vector<uint32_t> states(count);
    for (uint32_t& state : states)
      state = below(4) ? static_cast<uint32_t>(below(set.ended() + 1)) : heavy[below(heavy.size())];
    std::vector<int32_t> at(count);
    for (size_t i = 0; i < count; ++i) at[i] = static_cast<int32_t>(i);
    if (below(10) == 0) {
      memset(rows.words(), 0xff, (num_rows + rows.num_behind()) * num_words * sizeof(uint32_t));
      rows.forget();
    }
    if (below(3))
      rows.share(states.data(), count, at.data());
    else
      rows.fill(states.data(), count);
    for (size_t i = 0; i < count; ++i) {
      set.fill(states[i], want.data());
      const uint32_t* const shown = rows.words() + static_cast<size_t>(at[i]) * num_words;
      CHECK(memcmp(shown, want.data(), num_words * sizeof(uint32_t)) == 0);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 100;
  for (int round = 0; round < rounds; ++round) {
    source.seed(round);
    const World world(round % 3 == 0 ? 4 : round % 3 == 1 ? 40 : 256);
    const MaskView view = world.view();
    CHECK(find_mask_flaw(view, view.num_nodes + uint64_t(2), world.made.entries.size()) == nullptr);
    const MaskSet set(view);
    for (const size_t num_rows : {size_t(1), size_t(33), size_t(300)}) follow_states(set, num_rows);
  }
  printf("fuzz_masks: %d rounds\n", rounds);
}
