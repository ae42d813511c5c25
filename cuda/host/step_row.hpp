// One step's proposals, laid out so that a child can ask: a bitmap over the low 16 bits of the tokens, and a
// small table from token to log-prob behind it. Best first, so that the worst can be forgotten as the floors rise.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "flashtrie/search.cuh"
#include "scan.hpp"

namespace flashtrie {

struct Proposal {
  float logprob;
  uint32_t token;
};

class StepRow {
 public:
  StepRow() : bitmap_(kBitmapWords, 0) {}

  // Duplicates of a token count once, with their best log-prob. Costs num_slots where log-probs do not ascend; else
  // sorting them besides.
  void load(const TrieView& trie, const SearchParams& params, const uint32_t* tokens, const float* logprobs,
            uint64_t num_slots);

  // Forgets the worst proposals, up to one whose log-prob `reaches`. False if none is left.
  template <typename Reaches>
  bool keep(const Reaches& reaches) {
    for (; num_left_ > 0; --num_left_) {
      const Proposal worst = proposals_[num_left_ - 1];
      if (reaches(worst.logprob)) return true;
      if (owns_bit_[num_left_ - 1]) bitmap_[(worst.token & 0xffff) >> 5] &= ~(1u << (worst.token & 31));
    }
    return false;
  }

  // Of the proposals left when it was made, at most twice as many as now.
  const Sieve& sieve() {
    if (num_left_ <= num_sieved_ / 2) make_sieve();
    return sieve_;
  }
  const uint32_t* bitmap() const { return bitmap_.data(); }
  std::span<const Proposal> proposals() const { return {proposals_.data(), num_left_}; }  // distinct, best first

  struct Place {
    uint32_t token = kNoToken;
    float logprob = 0;
  };
  struct Table {
    const Place* places;
    int log2_size;

    // The log-prob of a proposed token, forgotten or not; -inf for one that only shares its low half with such.
    float find(uint32_t token) const {
      const uint32_t mask = (1u << log2_size) - 1;
      for (uint32_t at = token_hash(token, log2_size);; at = (at + 1) & mask) {
        if (places[at].token == token) return places[at].logprob;
        if (places[at].token == kNoToken) return -INFINITY;
      }
    }
  };
  Table table() const { return {table_.data(), log2_size_}; }

 private:
  // What a row's proposals are put into: on the stack, since the compiler would read members again after every store.
  struct Insertion {
    Place* places;
    uint32_t* bitmap;
    Proposal* proposals;
    uint8_t* owns_bit;
    int log2_size;
    size_t count = 0;

    void insert(uint32_t token, float logprob);
  };

  void make_sieve();
  Insertion begin();
  // False, with nothing to be relied on, where a log-prob is above the one before.
  bool insert_falling(TrieView trie, SearchParams params, const uint32_t* tokens, const float* logprobs,
                      uint64_t num_slots);
  void insert_sorted(const TrieView& trie, const SearchParams& params, const uint32_t* tokens, const float* logprobs,
                     uint64_t num_slots);

  std::vector<uint32_t> bitmap_;
  std::vector<Place> table_;
  int log2_size_ = 0;
  std::vector<Proposal> proposals_;
  std::vector<Proposal> sorted_;
  std::vector<uint8_t> owns_bit_;  // of a proposal: no better one set the bit of its low half
  size_t num_left_ = 0;
  Sieve sieve_;
  size_t num_sieved_ = 0;
};

}  // namespace flashtrie
