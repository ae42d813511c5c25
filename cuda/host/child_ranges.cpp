#include "child_ranges.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define FLASHTRIE_X86 1
#include <immintrin.h>
#endif

namespace flashtrie {

void find_child_ranges_portable(const TrieView& trie, const uint32_t* nodes, uint32_t count, ChildRange* ranges) {
  for (uint32_t i = 0; i < count; ++i) ranges[i] = child_range(trie, nodes[i]);
}

#if defined(FLASHTRIE_X86)
namespace {

// As child_range, but the word of the zero before the node's ones is chosen among four without a branch, since which
// one it is cannot be foretold.
__attribute__((target("bmi,bmi2"))) void find_child_ranges_bmi2(const TrieView& trie, const uint32_t* nodes,
                                                                      uint32_t count, ChildRange* ranges) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t node = nodes[i], skip = node & 63;
    const NodeLine& line = trie.lines[node >> 6];
    const uint64_t begin = uint64_t(node - skip) + line.first_child - 1;
    const uint64_t* words = trie.louds + (begin >> 6);
    const uint64_t zeros[4] = {~words[0] & (~uint64_t(0) << (begin & 63)), ~words[1], ~words[2], ~words[3]};
    uint32_t upto[4];  // zeros in the words up to this one
    for (int w = 0; w < 4; ++w) upto[w] = static_cast<uint32_t>(popcount64(zeros[w])) + (w > 0 ? upto[w - 1] : 0);
    if (line.wide != kNotWide || skip == 0 || upto[3] < skip) {
      ranges[i] = child_range(trie, node);
      continue;
    }
    uint32_t before = 0, word = 0;
    uint64_t at = zeros[0];
    for (int w = 0; w < 3; ++w) {
      const bool is_behind = upto[w] < skip;
      before = is_behind ? upto[w] : before;
      at = is_behind ? zeros[w + 1] : at;
      word += is_behind;
    }
    const uint64_t zero = _pdep_u64(uint64_t(1) << (skip - 1 - before), at);
    uint64_t end = (begin & ~uint64_t(63)) + 64 * word;
    const uint64_t start = end + _tzcnt_u64(zero) + 1;
    // That the node's last one is in the next word cannot be foretold either.
    uint64_t rest = at & ~(zero ^ (zero - 1));
    const uint64_t spills = rest == 0;
    rest |= ~words[word + 1] & (0 - spills);
    end += spills << 6;
    for (const uint64_t* next = words + word + 1; rest == 0; end += 64) rest = ~*++next;
    end += _tzcnt_u64(rest);
    const uint32_t first = static_cast<uint32_t>(start - node) + 1;
    ranges[i] = {first, first + static_cast<uint32_t>(end - start)};
  }
}

}  // namespace
#endif

FindChildRanges find_child_ranges() {
#if defined(FLASHTRIE_X86)
  static const FindChildRanges best = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("bmi2") ? &find_child_ranges_bmi2 : &find_child_ranges_portable;
  }();
  return best;
#else
  return &find_child_ranges_portable;
#endif
}

}  // namespace flashtrie
