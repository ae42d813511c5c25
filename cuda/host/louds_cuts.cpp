#include "louds_cuts.hpp"

#include "fan_outs.hpp"
#include "threads.hpp"

namespace flashtrie {
namespace {

constexpr uint64_t kPieceWords = 1 << 13;  // half a million bits, some 0.3 ms of a walk

struct Counts {
  uint64_t ones = 0, inner = 0;
};

// Ones, and zeros behind a one (the ends of unary codes of inner nodes), of the words [begin, end) before `num_bits`.
Counts count_piece(const uint64_t* louds, uint64_t begin, uint64_t end, uint64_t num_bits) {
  Counts counts;
  uint64_t before = begin > 0 ? louds[begin - 1] >> 63 : 0;
  for (uint64_t at = begin; at < end; ++at) {
    const uint64_t left = num_bits - 64 * at, valid = left >= 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
    const uint64_t word = louds[at] & valid;
    counts.ones += popcount64(word);
    counts.inner += popcount64(~word & (word << 1 | before) & valid);
    before = word >> 63;
  }
  return counts;
}

// From the first node whose code begins at the word, or behind it, to the first one whose number is a multiple of 64.
LoudsCut settle(const uint64_t* louds, uint64_t num_bits, uint64_t word, const Counts& before) {
  const uint64_t bit = 64 * word;
  LoudsCut cut{bit - before.ones, bit, before.ones + 1, before.inner};
  FanOuts fan_outs(louds, num_bits, bit);
  if (word > 0 && louds[word - 1] >> 63) {  // in the middle of a code
    cut.child += fan_outs.next();
    ++cut.node;
    ++cut.num_inner;
  }
  while (cut.node % 64 != 0) {
    const uint64_t fan_out = fan_outs.next();
    cut.child += fan_out;
    cut.num_inner += fan_out > 0;
    ++cut.node;
  }
  cut.position = fan_outs.position();
  return cut;
}

}  // namespace

std::vector<LoudsCut> cut_louds(const uint64_t* louds, uint64_t num_nodes, int num_threads) {
  const uint64_t num_bits = 2 * num_nodes - 1, num_words = (num_bits + 63) / 64;
  const LoudsCut first{0, 0, 1, 0}, last{num_nodes, num_bits, num_nodes, 0};
  const uint64_t pieces = (num_words + kPieceWords - 1) / kPieceWords;
  if (pieces < 2 || num_threads < 2 || !(louds[0] & 1)) return {first, last};
  std::vector<Counts> counts(pieces + 1);
  parallel_for(pieces, 1, num_threads, [&](int, uint64_t piece, uint64_t) {
    counts[piece + 1] = count_piece(louds, piece * kPieceWords, std::min((piece + 1) * kPieceWords, num_words), num_bits);
  });
  for (uint64_t piece = 0; piece < pieces; ++piece) {
    counts[piece + 1].ones += counts[piece].ones;
    counts[piece + 1].inner += counts[piece].inner;
  }
  const bool ends_with_zero = !(louds[(num_bits - 1) >> 6] >> ((num_bits - 1) & 63) & 1);
  if (counts[pieces].ones != num_nodes - 1 || !ends_with_zero) return {first, last};
  std::vector<LoudsCut> cuts = {first};
  for (uint64_t piece = 1; piece < pieces; ++piece) {
    const uint64_t zeros_left = num_nodes - (64 * piece * kPieceWords - counts[piece].ones);
    if (zeros_left <= 64) break;  // too few nodes to come to a multiple of 64
    const LoudsCut cut = settle(louds, num_bits, piece * kPieceWords, counts[piece]);
    if (cut.node > cuts.back().node) cuts.push_back(cut);
  }
  cuts.push_back(last);
  return cuts;
}

}  // namespace flashtrie
