// Steps of a token trie on a GPU: what may follow a node, found by a warp.
//
//   question              dependent reads
//   the root              0  its dense words are asked for before the state is known
//   a leaf                1  node line
//   fan-out up to 32      3  node line, louds, labels
//   more                  3 and one for each factor of 32 in the fan-out; 4 where the node has a dense row
//   where a token leads   as many
#pragma once
#include "louds_window.cuh"
#include "token_kernels.cuh"
#include "trie.cuh"

namespace flashtrie {

constexpr uint32_t kDenseFanOut = 512;  // only nodes with more children have a dense row

struct Family {
  ChildRange children;
  bool terminal;  // a key ends at their parent
};

struct TrieChildren {
  TrieView trie;
  EndTokens ends;
  DenseRows dense;
  uint32_t vocab_size;

  static constexpr int kLanes = 32;
  FT_DEVICE uint32_t ended() const { return trie.num_nodes; }

  // Of a node; all lanes ask for the same.
  FT_DEVICE Family family(uint32_t node) const {
    const simt::Quad* line = reinterpret_cast<const simt::Quad*>(trie.lines + (node >> 6));
    const simt::Quad bits = simt::load_quad(line), counts = simt::load_quad(line + 1);
    const uint32_t first_child = counts.y, wide = counts.z;
    const bool terminal = ((node & 32 ? bits.y : bits.x) >> (node & 31)) & 1;
    const bool leaf = ((node & 32 ? bits.w : bits.z) >> (node & 31)) & 1;
    if (leaf) return {{0, 0}, terminal};
    LoudsWindow window;
    window.ask(trie, node, first_child, wide);
    return {window.resolve(trie, node, first_child, wide), terminal};
  }

  template <typename Tile>
  FT_DEVICE Share mark(uint32_t state, const Tile& tile, uint32_t* marks) const {
    if (state == 0 && dense.root_row != kNothing) return mark_dense(tile, dense, dense.root_row, marks);
    const uint32_t own_end = ends.own();
    if (state >= trie.num_nodes && !ends.after_end) return Share::nothing;
    const Family found = state < trie.num_nodes ? family(state) : Family{{0, 0}, true};
    const ChildRange range = found.children;
    if (range.fan_out() > kDenseFanOut) {
      const uint32_t at = find_first(0, dense.num_nodes, state, [this](uint32_t i) { return dense.nodes[i]; });
      if (at < dense.num_nodes && dense.nodes[at] == state) return mark_dense(tile, dense, at, marks);
    }
    const auto token = [this](uint32_t child) { return label(trie, child); };
    const uint32_t child = range.first + simt::lane();
    const uint32_t own = range.fan_out() <= 32 && child < range.last ? token(child) : kNothing;
    return mark_list(tile, own, range.first, range.last, token, ends, found.terminal, own_end, marks);
  }

  // The state after a token, or kNoNode; by a warp. At the end of a key an end token ends, even if it labels a child.
  FT_DEVICE uint32_t advance(uint32_t state, int64_t token) const {
    if (state >= trie.num_nodes || token < 0 || token >= vocab_size) return kNoNode;
    const uint32_t wanted = static_cast<uint32_t>(token);
    bool is_end = false;
#pragma unroll 1
    for (uint32_t i = simt::lane(); i < ends.count; i += 32) is_end |= ends.tokens[i] == wanted;
    const Family found = family(state);
    if (simt::any(is_end) && found.terminal) return ended();
    const ChildRange range = found.children;
    const uint32_t at = find_first(range.first, range.last, wanted, [this](uint32_t child) { return label(trie, child); });
    return at < range.last && label(trie, at) == wanted ? at : kNoNode;
  }
};

struct TrieChildrenParams {
  TrieChildren source;
  const uint32_t* states;  // num_rows
  uint32_t* tokens;        // [num_rows, capacity]: the children's tokens, ascending; what lies behind them stays
  uint32_t* nodes;         // [num_rows, capacity]: and the children
  uint32_t* counts;        // num_rows: the whole fan-out, even where it is more than the capacity
  uint32_t num_rows;
  uint32_t capacity;
};

FT_DEVICE void list_children(const TrieChildrenParams& p) {
  simt::release_next_kernel();
  const uint32_t row = warp_of_grid();
  if (row >= p.num_rows) return;
  simt::await_previous_kernel();
  const TrieView& trie = p.source.trie;
  const uint32_t state = p.states[row];
  const ChildRange range = state < trie.num_nodes ? p.source.family(state).children : ChildRange{0, 0};
  if (simt::lane() == 0) p.counts[row] = range.fan_out();
  const uint32_t count = range.fan_out() < p.capacity ? range.fan_out() : p.capacity;
  const uint64_t begin = static_cast<uint64_t>(row) * p.capacity;
#pragma unroll 1
  for (uint32_t i = simt::lane(); i < count; i += 32) {
    p.tokens[begin + i] = label(trie, range.first + i);
    p.nodes[begin + i] = range.first + i;
  }
}

}  // namespace flashtrie
