// The opened trie: checks the stored arrays once, derives the directories, and hands out a TrieView.
#pragma once
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "flashtrie/trie.cuh"
#include "unfilled.hpp"

namespace flashtrie {

// What the file says cannot be a trie; the message says why.
struct InvalidTrie : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The stored arrays, as they lie in the file. They must outlive the Trie.
struct TrieArrays {
  const uint64_t* louds = nullptr;
  uint64_t louds_words = 0;  // with kSpareWords words of padding behind the bits
  const uint64_t* terminal = nullptr;
  uint64_t terminal_words = 0;
  const uint16_t* label_low = nullptr;
  uint64_t num_labels = 0;
  const uint64_t* high_flags = nullptr;
  uint64_t high_flag_words = 0;
  const uint64_t* high_bits = nullptr;
  uint64_t high_words = 0;  // with kSpareWords words of padding, too
  int high_width = 0;
  uint64_t num_nodes = 0;
};

constexpr int kSpareWords = 4;
constexpr int kMaxHighWidth = 15;
constexpr uint64_t kMaxDepth = 65535;
constexpr uint64_t kMaxNodes = 0xffffffffull;

template <typename T>
using Restored = std::vector<T, Unfilled<T>>;

// From the compact sections to the resident ones: labels from their differences, terminal bits from those of the
// nodes with children. Arrays as in TrieArrays; throws InvalidTrie when louds and they do not fit together.
Restored<uint16_t> restore_labels(const uint64_t* louds, uint64_t num_nodes, const uint16_t* label_delta,
                                  int num_threads = 1);
Restored<uint64_t> restore_terminal(const uint64_t* louds, uint64_t num_nodes, const uint64_t* inner_terminal,
                                    uint64_t num_words, int num_threads = 1);

struct LoudsCut;

class Trie {
 public:
  // Throws InvalidTrie unless the arrays are a trie: counts agree, every node is its parent's child,
  // siblings strictly ascend, flags tell the truth, leaves are terminal. One pass over the nodes on `num_threads` threads.
  Trie(const TrieArrays& arrays, int num_threads);

  const TrieView& view() const { return view_; }
  const std::vector<NodeLine>& lines() const { return lines_; }
  const std::vector<uint32_t>& wide() const { return wide_; }
  const std::vector<uint32_t>& level_starts() const { return level_starts_; }  // first node of each level, then num_nodes
  uint32_t largest_label() const { return largest_label_; }  // 0 where there is none
  // The children of the root among which a label would be: a table over the labels' upper bits says where, since
  // the root is by far the widest node and every question begins there.
  ChildRange root_range(uint32_t token) const {
    const uint32_t place = token >> root_shift_;
    return place < root_starts_.size() - 1 ? ChildRange{root_starts_[place], root_starts_[place + 1]} : ChildRange{0, 0};
  }
  int depth() const { return static_cast<int>(level_starts_.size()) - 2; }

 private:
  struct LinesPart;
  void derive_lines(const TrieArrays& arrays, int num_threads);
  void derive_lines(const TrieArrays& arrays, const LoudsCut& cut, uint64_t end_node, LinesPart& part);
  void check_siblings(int num_threads);
  void find_levels();
  void index_root();

  std::vector<NodeLine> lines_;
  std::vector<uint32_t> wide_;
  std::vector<uint32_t> level_starts_;
  uint32_t largest_label_ = 0;
  std::vector<uint32_t> root_starts_;  // by label >> root_shift_: the first child of at least that label; then the end
  int root_shift_ = 0;
  TrieView view_{};
};

}  // namespace flashtrie
