#include "expander.hpp"

namespace flashtrie {
namespace {

// A fan-out this many times the number of proposals is searched once per proposal instead of scanned: a binary
// search costs about as much as scanning this many labels (measured: 80 ns against 0.4 ns a label with AVX-512).
constexpr uint64_t kScanPerSlot = 192;
// The same for the root, where a table says where to look (measured: from 8 to 64 it makes no difference).
constexpr uint64_t kScanPerSlotOfRoot = 32;

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

inline const uint64_t* high_word(const TrieView& trie, uint64_t rank) {
  return trie.high_bits + (rank * static_cast<uint64_t>(trie.high_width) >> 6);
}

}  // namespace

// The best beams come first. So when a proposal could lift a beam past neither floor, it can lift none behind it
// either, and is forgotten: float addition and the length factor are monotone, and node 0 would win every tie.
void Expander::expand(const Frontier& frontier, const Step& step) {
  row_.load(trie_, params_, step.tokens, step.logprobs, step.num_slots);
  candidates_.reset(params_.beam_width);
  const uint32_t num_beams = static_cast<uint32_t>(frontier.nodes.size());
  for (uint32_t beam = 0; beam < num_beams; ++beam) {
    const float score = frontier.scores[beam];
    if (!row_.keep([&](float logprob) { return may_count(step, score + logprob, 0); })) break;
    if (beam % kBeamsAhead == 0) find_families(frontier, beam, std::min(beam + kBeamsAhead, num_beams));
    const Family& family = families_[beam % kBeamsAhead];
    const uint64_t fan_out = family.children.fan_out(), num_proposals = row_.proposals().size();
    if (frontier.nodes[beam] == 0 && fan_out > kScanPerSlotOfRoot * num_proposals)
      search_root(step, family, beam, score);
    else if (fan_out > kScanPerSlot * num_proposals)
      search(step, family, beam, score);
    else
      scan(step, family, beam, score);
  }
  route_pending(step);
}

// Dependent reads: line, louds, labels, high parts. Those of all beams overlap: each pass prefetches for the next.
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
  for (uint32_t i = 0; i < end - begin; ++i) {
    const ChildRange children = ranges_[i];
    families_[i] = {children, children.last, 0};
    prefetch(trie_.label_low + children.first);
    prefetch(trie_.lines + (children.first >> 6));
    if (trie_.high_width > 0) {
      prefetch(trie_.high_flags + (children.first >> 6));
      prefetch(trie_.high_flags + ((children.last - 1) >> 6));
      prefetch(trie_.lines + ((children.last - 1) >> 6));
    }
  }
  if (trie_.high_width == 0) return;
  for (Family& family : std::span(families_).first(end - begin)) {
    if (family.children.fan_out() == 0) continue;
    family.first_high = first_high(trie_, family.children, &family.high_rank);
    prefetch(high_word(trie_, family.high_rank));
  }
}

inline uint32_t Expander::label_of(const Family& family, uint32_t child) const {
  const uint32_t low = trie_.label_low[child];
  if (child < family.first_high) return low;
  return packed_get(trie_.high_bits, family.high_rank + (child - family.first_high), trie_.high_width) << 16 | low;
}

// The child with this label in a part of the family, or kNoNode; halving without branches.
inline uint32_t Expander::find(const Family& family, ChildRange part, uint32_t token) const {
  uint32_t at = part.first, size = part.fan_out();
  if (size == 0) return kNoNode;
  while (size > 1) {
    const uint32_t half = size / 2;
    at = label_of(family, at + half) <= token ? at + half : at;
    size -= half;
  }
  return label_of(family, at) == token ? at : kNoNode;
}

void Expander::scan(const Step& step, const Family& family, uint32_t beam, float score) {
  for (uint64_t at = family.children.first; at < family.children.last; at += kLabelsPerScan) {
    const uint32_t first = static_cast<uint32_t>(at), count = std::min(family.children.last - first, kLabelsPerScan);
    const uint16_t* labels = trie_.label_low + first;
    const uint64_t num_hits = count < 8 ? scan_labels_portable(labels, count, row_.bitmap(), first, hits_.data())
                                        : scan_(labels, count, row_.bitmap(), first, hits_.data());
    for (uint64_t hit = 0; hit < num_hits; ++hit) {
      const uint32_t token = label_of(family, hits_[hit]);
      float logprob;
      if (row_.find(token, &logprob)) judge(step, beam, hits_[hit], token, score + logprob);
    }
  }
}

void Expander::search(const Step& step, const Family& family, uint32_t beam, float score) {
  for (const Proposal& proposal : row_.proposals()) {
    const uint32_t child = find(family, family.children, proposal.token);
    if (child != kNoNode) judge(step, beam, child, proposal.token, score + proposal.logprob);
  }
}

void Expander::search_root(const Step& step, const Family& family, uint32_t beam, float score) {
  constexpr size_t kAhead = 8;
  const std::span<const Proposal> proposals = row_.proposals();
  for (size_t i = 0; i < proposals.size(); ++i) {
    if (i + kAhead < proposals.size()) {
      const uint32_t first = opened_.root_range(proposals[i + kAhead].token).first;
      prefetch(trie_.label_low + first);
      if (first >= family.first_high) prefetch(high_word(trie_, family.high_rank + (first - family.first_high)));
    }
    const uint32_t token = proposals[i].token, child = find(family, opened_.root_range(token), token);
    if (child != kNoNode) judge(step, beam, child, token, score + proposals[i].logprob);
  }
}

// Whether a child with this score could be among the best candidates or results.
bool Expander::may_count(const Step& step, float score, uint32_t node) const {
  if (!(score > params_.sequence_threshold)) return false;
  if (candidates_.admits(rank_key(score, node))) return true;
  const float total = params_.eos == kNoToken ? score : score + step.end_logprob;
  return step.can_end && results_.admits(rank_key(total * params_.length_factors[step.number + 1], node));
}

// First what needs no memory beyond the labels: score and floors. What passes has its line prefetched, and is
// routed once the lines of many are under way.
inline void Expander::judge(const Step& step, uint32_t beam, uint32_t child, uint32_t token, float score) {
  if (!may_count(step, score, child)) return;
  prefetch(trie_.lines + (child >> 6));
  const float total = params_.eos == kNoToken ? score : score + step.end_logprob;
  pending_[num_pending_++] = {rank_key(score, child), total, child, beam, token};
  if (num_pending_ == pending_.size()) route_pending(step);
}

void Expander::route_pending(const Step& step) {
  for (const Pending& hit : std::span(pending_).first(num_pending_)) route(step, hit);
  num_pending_ = 0;
}

void Expander::route(const Step& step, const Pending& hit) {
  const NodeLine& line = trie_.lines[hit.child >> 6];
  const uint64_t bit = uint64_t(1) << (hit.child & 63);
  candidates_.push_if(!(line.leaf & bit) & candidates_.admits(hit.key), {hit.key, hit.beam, hit.token});
  if (!step.can_end) return;
  const uint64_t result_key = rank_key(hit.total * params_.length_factors[step.number + 1], hit.child);
  results_.push_if(((line.terminal & bit) != 0) & results_.admits(result_key),
                   {result_key, hit.total, step.number + 1, hit.beam, hit.token});
}

}  // namespace flashtrie
