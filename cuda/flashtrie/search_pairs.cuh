// Part of search_group.cuh: frontiers with very many label groups, as the second step of a search often has.
//
// Of all pairs of a beam and a proposal few can pass the step's cut. So those above a bar are looked at first, some for each
// beam that is wanted: a beam's children are asked for the proposals that lead it above the bar, in the table of wide nodes, or
// scanned where that is less work. Then floors are known, and a last round takes what they leave; where too little was found for
// floors, the bar is lowered first.
#pragma once

namespace flashtrie {

constexpr uint32_t kBarBeams = 128;    // that stand for all, when a bar is chosen
constexpr uint32_t kMostPairs = 1u << 24;  // are above a bar
constexpr float kBarSpan = 64.0f;      // bars are looked for so far below the best pair
constexpr float kPairMargin = 1.5f, kLeastGrowth = 1.5f, kMostGrowth = 32.0f;  // of a round's pairs, as long as there are no floors

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::is_heavy() const {
  return num_label_groups_ >= batch_.heavy_groups;
}

// The next frontier, laid out anew: its first round. A barrier of the block before; ends with one.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::first_round() {
  const float* logprobs = table(step_ + 1).logprobs;
  bool rises = false;
#pragma unroll 1
  for (uint32_t slot = simt::thread() + 1; slot < batch_.num_slots; slot += kWarps * 32) rises |= !(logprobs[slot - 1] >= logprobs[slot]);
  if (rises) control().round.rises = 1;
  const uint32_t most = beam_width_ > result_limit_ ? beam_width_ : result_limit_;
  simt::sync_block();
  begin_round(step_ + 1, true, (most * batch_.pairs_per_beam + kBlocks - 1) / kBlocks);
}

// Raises both floors to the bins in which the group's last wanted entries lie. A barrier of the block before; ends
// with one of the group, since histograms are read everywhere.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::raise_floors() {
  if (kBlocks == 1) share_totals(0);  // in a cluster every round ends with that
  share_totals(1);
  simt::sync_group<kBlocks>();
  const int which = static_cast<int>(simt::thread() >> 5);
  if (which < 2) {
    const BinCut cut = group_cut(which, which == 0 ? beam_width_ : result_limit_);
    const uint32_t bin = cut.all ? 0 : cut.wanted == 0 ? cut.bin + 1 : cut.bin;
    if (simt::lane() == 0) simt::atomic_max(&control().floors[which], bin_start(bin));
  }
  simt::sync_group<kBlocks>();
}

// The round after one that is through: above a lower bar, or what the floors leave. Ends with a barrier of the block.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::next_round() {
  const float candidates_missing = is_last_ || control().floors[0] != 0 ? 0 : missing(0, beam_width_);
  const float results_missing = !can_end_ || control().floors[1] != 0 ? 0 : missing(1, result_limit_);
  const float times = candidates_missing > results_missing ? candidates_missing : results_missing;
  begin_round(step_, false, times == 0 ? kNoSlot : static_cast<uint32_t>(control().round.wanted * times));
}

// How many times as many pairs it takes, by what has been found so far, to find more than n.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE float GroupSearch<kBlocks, kWarps, kMode>::missing(int which, uint32_t n) const {
  const float times = kPairMargin * n / (group_entries(which) + 1);
  return times < kLeastGrowth ? kLeastGrowth : times > kMostGrowth ? kMostGrowth : times;
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::begin_round(uint32_t step, bool is_first, uint32_t wanted) {
  const float before = control().round.bar;
  const bool rises = control().round.rises != 0;
  const float bar = wanted < kMostPairs ? find_bar(step, wanted) : -INFINITY;
  PairRound* round = &control().round;
  simt::sync_block();
  if (simt::thread() == 0) *round = {bar, wanted, rises, bar > -INFINITY, 0, 0};
  simt::sync_block();
  bool has_work = false;
  const uint32_t groups = lay_out(step, 0, num_beams_, [&](uint32_t at) {
    Beam beam = beams()[at];
    if (!is_first && !(beam.start & kAsks)) beam.last = beam.first;  // all its children have been scanned
    const ChildRange range = {beam.first, beam.last};
    const uint32_t done = is_first ? 0 : num_slots_above(step, beam.score, before);
    const uint32_t upto = bar > -INFINITY ? num_slots_above(step, beam.score, bar) : num_usable_slots(step, beam.score);
    beam.start = history(step - 1)[at];
    if (range.fan_out() == 0 || upto <= done) return Arrival{beam, 1 | kAsks, done};  // a slot below the bar or the floors
    has_work = true;
    const uint32_t scanned = label_groups(range);
    const bool asks = done > 0 || (range.fan_out() >= batch_.children.fan_out && (upto - done) * batch_.ask_cost < scanned);
    return asks ? Arrival{beam, (upto - done) | kAsks, done} : Arrival{beam, scanned, 0};
  });
  if (has_work) round->has_work = 1;
  simt::sync_block();
  if (simt::thread() == 0) round->label_groups = round->has_work ? groups : 0;
  simt::sync_block();
}

// A score that about so many pairs of this block's beams reach; -INFINITY where all do not come to that. All warps, each
// of which tries another bar, twice.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE float GroupSearch<kBlocks, kWarps, kMode>::find_bar(uint32_t step, uint32_t wanted) {
  constexpr uint32_t kBeamsALane = kBarBeams / 32;
  const uint32_t lane = simt::lane(), warp = simt::thread() >> 5;
  const uint32_t stride = (num_beams_ + kBarBeams - 1) / kBarBeams;
  float scores[kBeamsALane];
  uint32_t best = 0, worst = 0;  // complement of the latter
#pragma unroll
  for (uint32_t i = 0; i < kBeamsALane; ++i) {
    const uint32_t at = (i * 32 + lane) * stride;
    scores[i] = at < num_beams_ ? beams()[at].score : -INFINITY;
    const uint32_t ordered = ordered_score(scores[i]);
    best = at < num_beams_ && ordered > best ? ordered : best;
    worst = at < num_beams_ && ~ordered > worst ? ~ordered : worst;
  }
  float high = score_of(simt::reduce_max(best)) + score_of(control().best_logprobs[step & 1]);
  float low = score_of(~simt::reduce_max(worst)) + table(step).logprobs[batch_.num_slots - 1];
  if (!(low > high - kBarSpan)) low = high - kBarSpan;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const float width = (high - low) / kWarps;
    uint32_t count = 0;
#pragma unroll
    for (uint32_t i = 0; i < kBeamsALane; ++i) count += num_slots_above(step, scores[i], high - width * (warp + 1));
    count = simt::reduce_add(count) * stride;
    if (lane == 0) control().warp_sums[warp] = count;
    simt::sync_block();
    const uint32_t enough = simt::ballot(lane < kWarps && control().warp_sums[lane] >= wanted);
    if (enough == 0) return -INFINITY;
    const uint32_t first = simt::lowest_one(enough);
    low = high - width * (first + 1);
    high -= width * first;
    simt::sync_block();  // the sums have been read
  }
  return low;
}

// How many slots of a row lead a beam of this score to at least the bar; of a row whose log-probs rise somewhere all, if
// its best one does.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::num_slots_above(uint32_t step, float beam_score, float bar) const {
  return first_slots(step, beam_score, [&](float score) { return score >= bar; });
}

// The same for the floors.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::num_usable_slots(uint32_t step, float beam_score) const {
  return first_slots(step, beam_score, [&](float score) { return can_reach(score); });
}

template <int kBlocks, int kWarps, Mode kMode>
template <typename Reaches>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::first_slots(uint32_t step, float beam_score, const Reaches& reaches) const {
  if (control().round.rises) return reaches(beam_score + score_of(control().best_logprobs[step & 1])) ? batch_.num_slots : 0;
  const float* logprobs = table(step).logprobs;
  uint32_t low = 0, high = batch_.num_slots;
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = (low + high) >> 1;
    if (reaches(beam_score + logprobs[middle]))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Whether the round leaves out a pair that it has been laid out with.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::is_below_bar(float beam_score, float logprob) const {
  const PairRound& round = control().round;
  if (!round.goes_on) return false;
  return beam_score + (round.rises ? score_of(control().best_logprobs[step_ & 1]) : logprob) < round.bar;
}

}  // namespace flashtrie
