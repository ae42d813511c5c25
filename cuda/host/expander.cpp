#include "expander.hpp"

namespace flashtrie {
namespace {

// A fan-out this many times the number of proposals is searched once per proposal instead of scanned: a binary
// search costs about as much as scanning this many labels (measured: 80 ns against 0.4 ns a label with AVX-512).
constexpr uint64_t kScanPerSlot = 192;
// The same for the root, where a table says where to look (measured: from 8 to 64 it makes no difference).
constexpr uint64_t kScanPerSlotOfRoot = 32;

// Up to so many proposals the sieve of 1,024 bits lets less than an eighth of the labels through.
constexpr size_t kMostSieved = 128;

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

inline const uint64_t* high_word(const TrieView& trie, uint64_t rank) {
  return trie.high_bits + (rank * static_cast<uint64_t>(trie.high_width) >> 6);
}

}  // namespace

// The best beams come first. So when a proposal could lift a beam past neither floor, it can lift none behind it
// either, and is forgotten: float addition and the length factor are monotone, and ties with a floor pass.
void Expander::expand(const Frontier& frontier, const Step& step) {
  row_.load(trie_, params_, step.tokens, step.logprobs, step.num_slots);
  candidates_.reset(params_.beam_width);
  const uint32_t num_beams = static_cast<uint32_t>(frontier.nodes.size());
  for (uint32_t begin = 0; begin < num_beams; begin += beams_per_turn_) {
    const float best = frontier.scores[begin];
    const Floors must_reach = floors(step);
    if (!row_.keep([&](float logprob) { return must_reach.admit(best + logprob); })) break;
    if (begin % kBeamsAhead == 0) find_families(frontier, begin, std::min(begin + kBeamsAhead, num_beams));
    take_turn(frontier, step, begin, std::min(begin + beams_per_turn_, num_beams));
  }
}

// Dependent reads: line, louds, labels. Those of all beams overlap: each pass prefetches for the next.
void Expander::find_families(const Frontier& frontier, uint32_t begin, uint32_t end) {
  for (uint32_t beam = begin; beam < end; ++beam) {
    const uint32_t node = frontier.nodes[beam];
    const NodeLine& line = trie_.lines[node >> 6];
    if (line.wide == kNotWide) {
      const uint64_t bit = (uint64_t(node) & ~uint64_t(63)) + line.first_child - 1;
      prefetch(trie_.louds + (bit >> 6));
    } else {
      prefetch(trie_.wide + uint64_t(line.wide) * kWideStride + (node & 63));
    }
  }
  find_child_ranges_(trie_, frontier.nodes.data() + begin, end - begin, ranges_.data());
  for (const ChildRange children : std::span(ranges_).first(end - begin)) {
    prefetch(trie_.label_low + children.first);
    prefetch(trie_.lines + (children.first >> 6));
    if (trie_.high_width > 0) prefetch(trie_.high_flags + (children.first >> 6));
  }
}

// Most beams have a few children, and most of those no match. One list holds them all, so that nothing is foretold
// wrongly for each beam: how many children, how many of them match.
void Expander::take_turn(const Frontier& frontier, const Step& step, uint32_t begin, uint32_t end) {
  uint32_t num_few = 0;
  for (uint32_t beam = begin; beam < end; ++beam) {
    const ChildRange children = ranges_[beam % kBeamsAhead];
    const uint32_t fan_out = children.fan_out();
    if (fan_out > kFewChildren) {
      ask_many(frontier, step, beam, children);
      continue;
    }
    Match* to = few_.data() + num_few;
    for (uint32_t at = 0; at < fan_out; at += 8)
      for (uint32_t i = at; i < at + 8; ++i) to[i] = {children.first + i, beam};
    num_few += fan_out;
  }
  run_search(frontier, step);
  if (num_matches_ + num_few > kMostMatches) judge(frontier, step);
  const uint32_t* bitmap = row_.bitmap();
  const uint16_t* labels = trie_.label_low;
  Match* to = matches_.data() + num_matches_;
  for (const Match& child : std::span(few_).first(num_few)) {
    *to = child;
    to += bitmap_test(bitmap, labels[child.child]);
  }
  num_matches_ = static_cast<uint32_t>(to - matches_.data());
  judge(frontier, step);
}

void Expander::ask_many(const Frontier& frontier, const Step& step, uint32_t beam, ChildRange children) {
  const uint64_t fan_out = children.fan_out(), num_proposals = row_.proposals().size();
  const bool is_root = frontier.nodes[beam] == 0;
  if (fan_out > (is_root ? kScanPerSlotOfRoot : kScanPerSlot) * num_proposals)
    search(frontier, step, beam, children, is_root);
  else
    scan(frontier, step, beam, children);
}

void Expander::scan(const Frontier& frontier, const Step& step, uint32_t beam, ChildRange children) {
  const ScanLabels scan = row_.proposals().size() <= kMostSieved ? scans_.sieved : scans_.plain;
  for (uint64_t at = children.first; at < children.last; at += kLabelsPerScan) {
    const uint32_t first = static_cast<uint32_t>(at), count = std::min(children.last - first, kLabelsPerScan);
    const uint64_t num_hits = scan(trie_.label_low + first, count, row_.bitmap(), row_.sieve(), first, hits_.data());
    if (num_matches_ + num_hits > kMostMatches) judge(frontier, step);
    for (uint64_t hit = 0; hit < num_hits; ++hit) matches_[num_matches_++] = {hits_[hit], beam};
  }
}

void Expander::search(const Frontier& frontier, const Step& step, uint32_t beam, ChildRange children, bool is_root) {
  uint64_t rank = 0;
  const uint32_t boundary = trie_.high_width == 0 ? children.last : first_high(trie_, children, &rank);
  const uint32_t rank_base = static_cast<uint32_t>(rank) - boundary;
  for (const Proposal& proposal : row_.proposals()) {
    const ChildRange part = is_root                    ? opened_.root_range(proposal.token)
                            : proposal.token <= 0xffff ? ChildRange{children.first, boundary}
                                                       : ChildRange{boundary, children.last};
    if (part.fan_out() == 0) continue;
    prefetch(trie_.label_low + part.first + part.fan_out() / 2);
    const bool is_high = proposal.token > 0xffff;
    if (is_high ? high_search_.add(part, proposal.token, beam, rank_base) : low_search_.add(part, proposal.token, beam))
      run_search(frontier, step);
  }
}

void Expander::run_search(const Frontier& frontier, const Step& step) {
  if (num_matches_ + 2 * kSearchedTogether > kMostMatches) judge(frontier, step);
  Match* end = low_search_.run(trie_, matches_.data() + num_matches_);
  end = high_search_.run(trie_, end);
  num_matches_ = static_cast<uint32_t>(end - matches_.data());
}

Expander::Floors Expander::floors(const Step& step) const {
  return {params_.sequence_threshold, candidates_.floor_score(), step.can_end ? results_.floor_score() : INFINITY,
          step.end_logprob, params_.length_factors[step.number + 1]};
}

// First what needs no memory beyond the labels: score and floors. What passes is routed once all their lines are
// under way.
void Expander::judge(const Frontier& frontier, const Step& step) {
  if (trie_.high_width > 0) {
    find_high_ranks();
    route(step, keep_pending<true>(frontier, floors(step)));
  } else {
    route(step, keep_pending<false>(frontier, floors(step)));
  }
}

// The ranks of the matches' high parts. Flags and lines, then high parts: each pass prefetches for the next.
void Expander::find_high_ranks() {
  const TrieView trie = trie_;
  const std::span<const Match> matches = std::span(matches_).first(num_matches_);
  for (const Match& match : matches) {
    prefetch(trie.high_flags + (match.child >> 6));
    prefetch(trie.lines + (match.child >> 6));
  }
  uint32_t* rank = high_ranks_.data();
  for (const Match& match : matches) {
    *rank = static_cast<uint32_t>(high_rank(trie, match.child));
    prefetch(high_word(trie, *rank++));
  }
}

// Everything is copied out of the members first, or else the compiler reads it again after every match that it writes.
template <bool kHasHigh>
uint32_t Expander::keep_pending(const Frontier& frontier, const Floors& must_reach) {
  const Floors floors = must_reach;
  const TrieView trie = trie_;
  const StepRow::Table table = row_.table();
  const float* scores = frontier.scores.data();
  const Match* matches = matches_.data();
  const uint32_t* ranks = high_ranks_.data();
  Pending* to = pending_.data();
  for (uint32_t i = 0, count = std::exchange(num_matches_, 0); i < count; ++i) {
    const auto [child, beam] = matches[i];
    prefetch(trie.lines + (child >> 6));
    uint32_t token = trie.label_low[child];
    if (kHasHigh) {  // read even where there is none: which nodes have one cannot be foretold
      const uint32_t has_high = test_bit(trie.high_flags, child);
      token |= (packed_get(trie.high_bits, ranks[i], trie.high_width) & (0 - has_high)) << 16;
    }
    const float score = scores[beam] + table.find(token);
    *to = {child, beam, token, score};
    to += floors.admit(score);
  }
  return static_cast<uint32_t>(to - pending_.data());
}

void Expander::route(const Step& step, uint32_t num_pending) {
  const NodeLine* lines = trie_.lines;
  const Pending* pending = pending_.data();
  candidates_.push(num_pending, [=](uint64_t i, Candidate& to) {
    const Pending hit = pending[i];
    to = {rank_key(hit.score, hit.child), hit.beam, hit.token};
    return !(lines[hit.child >> 6].leaf >> (hit.child & 63) & 1);
  });
  if (!step.can_end) return;
  const bool adds_end = params_.eos != kNoToken;
  const float end_logprob = step.end_logprob, factor = params_.length_factors[step.number + 1];
  const uint32_t depth = step.number + 1;
  results_.push(num_pending, [=](uint64_t i, Result& to) {
    const Pending hit = pending[i];
    const float total = adds_end ? hit.score + end_logprob : hit.score;
    to = {rank_key(total * factor, hit.child), total, depth, hit.beam, hit.token};
    return lines[hit.child >> 6].terminal >> (hit.child & 63) & 1;
  });
}

}  // namespace flashtrie
