#include "automaton_walk.hpp"

namespace flashtrie {

void walk_automaton(const AutomatonView& automaton, const std::vector<std::string_view>& members,
                    const std::vector<uint32_t>& shared, size_t deepest, uint32_t* outputs, uint8_t* labels) {
  const AutomatonView walked = automaton;      // of one's own: a written byte may alias anything else
  std::vector<uint32_t> path(deepest + 1, 0);  // states of the current member by depth
  uint32_t node = 1;
  for (size_t i = 0; i < members.size(); ++i) {
    const std::string_view member = members[i];
    uint32_t state = path[shared[i]];
    for (size_t depth = shared[i]; depth < member.size(); ++depth, ++node) {
      const uint8_t byte = static_cast<uint8_t>(member[depth]);
      state = walked.step(state, byte);
      path[depth + 1] = state;
      outputs[node] = walked.slots[state].output;
      labels[node] = byte;
    }
  }
}

}  // namespace flashtrie
