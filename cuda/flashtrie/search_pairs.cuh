// Part of search_group.cuh: frontiers with very many label groups, as the second step of a search often has.
//
// Of all pairs of a beam and a proposal few can pass the step's cut. So those above a bar are looked at first, some for each
// beam that is wanted: a beam's children are asked for the proposals that lead it above the bar, in the table of wide nodes, or
// scanned where that is less work. Then floors are known, and a last round takes what they leave; where too little was found for
// floors, the bar is lowered first.
#pragma once

namespace flashtrie {

constexpr uint32_t kBarBeams = 128;  // that stand for all, when a bar is chosen
// A bar that has found too little for floors is followed by that of a slot so many times further down.
constexpr float kPairMargin = 1.5f, kLeastGrowth = 1.5f, kMostGrowth = 32.0f;

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
  simt::sync_block();
  begin_round_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), step_ + 1, true, batch_.bar_slot);
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
  PairRound* round = &control().round;
  if ((is_last_ || control().floors[0] != 0) && (!can_end_ || control().floors[1] != 0) && !can_reach(round->bar)) {
    simt::sync_block();  // it has been read
    if (simt::thread() == 0) round->goes_on = round->label_groups = 0;
    return simt::sync_block();
  }
  const float candidates_missing = is_last_ || control().floors[0] != 0 ? 0 : missing(0, beam_width_);
  const float results_missing = !can_end_ || control().floors[1] != 0 ? 0 : missing(1, result_limit_);
  const float times = candidates_missing > results_missing ? candidates_missing : results_missing;
  begin_round_outlined<kBlocks, kWarps, kMode>(
      batch_, shared_, state(), step_, false, times == 0 ? kNoSlot : static_cast<uint32_t>((round->slot + 1) * times));
}

// How many times as many pairs it takes, by what this block has found so far, for the group to find more than n. What
// the others have found they may be telling just now.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE float GroupSearch<kBlocks, kWarps, kMode>::missing(int which, uint32_t n) const {
  const float times = kPairMargin * n / (kBlocks * num_entries(which) + 1);
  return times < kLeastGrowth ? kLeastGrowth : times > kMostGrowth ? kMostGrowth : times;
}

// Lays out a round: for each beam the slots that lead it above the bar of `slot` and have not been asked for, or all its children
// to be scanned. Past the last slot there is no bar, and floors alone decide. A beam without either keeps one slot, which `ask`
// leaves out, since every beam of a frontier has a group. All threads; ends with a barrier of the block.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::begin_round(uint32_t step, bool is_first, uint32_t slot) {
  const float before = is_first ? INFINITY : control().round.bar;
  const bool rises = control().round.rises != 0;
  const float bar = slot < batch_.num_slots ? fminf(bar_at(step, slot), before) : -INFINITY;
  PairRound* round = &control().round;
  simt::sync_block();
  if (simt::thread() == 0) *round = {bar, slot, rises, bar > -INFINITY, 0, 0};
  simt::sync_block();
  bool has_work = false;
  const uint32_t groups = lay_out(step, 0, num_beams_, [&](uint32_t at) {
    Beam beam = beams()[at];
    if (!is_first && !(beam.start & kAsks)) beam.last = beam.first;  // all its children have been scanned
    const ChildRange range = {beam.first, beam.last};
    const uint32_t done = is_first ? 0 : num_slots_where(step, beam.score, [&](float score) { return score >= before; });
    const uint32_t upto = num_slots_where(step, beam.score, [&](float score) { return bar > -INFINITY ? score >= bar : can_reach(score); });
    beam.start = history(step - 1)[at];
    if (range.fan_out() == 0 || upto <= done) return Arrival{beam, 1 | kAsks, done};
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

// The score that a slot of the row gives a middling beam of this block. On real and synthetic grids 4 to 10 pairs for each beam
// reach that of the third slot, 7 to 16 that of the fifth.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE float GroupSearch<kBlocks, kWarps, kMode>::bar_at(uint32_t step, uint32_t slot) const {
  const uint32_t stride = (num_beams_ + kBarBeams - 1) / kBarBeams;
  uint32_t sum = 0;
#pragma unroll 1
  for (uint32_t at = simt::lane() * stride; at < num_beams_; at += 32 * stride) sum += ordered_score(beams()[at].score) / kBarBeams;
  return score_of(simt::reduce_add(sum) / ((num_beams_ + stride - 1) / stride) * kBarBeams) + table(step).logprobs[slot];
}

// How many slots of a row lead a beam of this score to one that `reaches`; of a row whose log-probs rise somewhere all, if its
// best one does.
template <int kBlocks, int kWarps, Mode kMode>
template <typename Reaches>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::num_slots_where(uint32_t step, float beam_score, const Reaches& reaches) const {
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

// Whether a pair is left to a later round, though a beam has a slot for it (see begin_round).
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::is_below_bar(float beam_score, float logprob) const {
  const PairRound& round = control().round;
  if (!round.goes_on) return false;
  return beam_score + (round.rises ? score_of(control().best_logprobs[step_ & 1]) : logprob) < round.bar;
}

}  // namespace flashtrie
