// The CPU systems of the FlashTrie paper (appendix B), over the same trie, grids and scoring as ours, for the
// benchmark. Both give the same bytes as every engine; what differs is the work they do for them.
#pragma once
#include <cstdint>
#include <memory>

#include "search.hpp"

namespace flashtrie {

// MARISA-Int (B.1): one thread; every (beam, proposal) pair is looked up by its full prefix from the root, with a
// second traversal for what the first one finds; candidates in a flat vector, pruned by a partial sort.
SearchOutput search_marisa_int(const Trie& trie, const Grids& grids, const SearchParams& params);

// MARISA-Opt (B.2): a fixed worker pool over the beams of a query, node state kept from step to step, a two-pointer
// merge of the sorted proposals with the sorted children, and a shared bounded min-heap whose floor prunes early.
class MarisaOpt {
 public:
  MarisaOpt(const Trie& trie, int num_threads);
  ~MarisaOpt();
  SearchOutput search(const Grids& grids, const SearchParams& params);

 private:
  class Searcher;
  std::unique_ptr<Searcher> searcher_;
};

}  // namespace flashtrie
