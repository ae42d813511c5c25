// Collects the tails that a build cuts off, and lays them out so that a tail that ends another one lies inside it.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "key_sorter.hpp"
#include "level_store.hpp"

namespace flashtrie {

constexpr size_t kMinTail = 2;  // labels below a node from which on they are cut off

struct TailCounts {
  uint64_t num_links = 0;
  uint64_t num_nodes = 0;   // labels cut off, over all links
  uint64_t num_labels = 0;  // labels stored
  int label_size = 1;       // bytes of each
};

class TailStore {
 public:
  // `memory`: bytes for sorting; past it, sorted runs go to the file.
  TailStore(uint64_t memory, int num_threads, TempFile& spill);

  // A tail, and its link: the `number`-th of those at depth `level`.
  void add(const uint32_t* labels, uint32_t length, uint32_t level, uint64_t number);
  // Call once, after the last tail.
  void finish(const KeySorter::Poll& poll);

  TailCounts counts() const { return counts_; }
  // The bytes of one section, front to back, in pieces; false where it is none of the tails'.
  bool read(const std::string& section, const Chunk& chunk) const;

 private:
  void store(const KeyRef& turned, KeySorter& places);
  void spill();

  const uint64_t memory_;
  const int num_threads_;
  TempFile& spill_;
  std::unique_ptr<KeySorter> sorter_;  // by reversed labels; the value says which link
  TailCounts counts_;
  uint32_t largest_ = 0;
  std::vector<uint32_t> turned_;
  std::vector<uint32_t> last_;  // the tail stored last, reversed
  Stream labels_;               // uint32
  BitStream ends_;
  Stream places_;  // uint32 a link, in the order of the nodes
};

}  // namespace flashtrie
