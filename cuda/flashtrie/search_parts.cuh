// Part of search_group.cuh: frontiers with very many label groups, as the second step of a search often has.
//
// They are put in order, best beams first, and expanded in parts. After the first part, floors are known that the
// pairs of a beam and a proposal must reach, and they are few: those of the best beams with many proposals, of the others with
// a few. So what floors leave of the rest is laid out anew: a beam whose children are many more than the proposals that it
// can still use is no longer scanned, but searched for each of these.
#pragma once

namespace flashtrie {

constexpr uint32_t kHeavyBeam = 32;  // label groups that a beam must have on average for parts to pay
constexpr uint32_t kPartGrowth = 4;  // from a part to the next, as long as there are no floors

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::is_heavy() const {
  return num_label_groups_ >= batch_.heavy_groups && (batch_.search_cost == 0 || num_label_groups_ >= kHeavyBeam * num_beams_);
}

// Takes over what the control says of the part to expand.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::begin_part() {
  num_beams_ = control().part.last;
  num_label_groups_ = control().part.label_groups;
}

// Puts the next frontier in order of its score bins, and leaves its first part in the control. The pool of candidates and
// their histogram, which nobody needs any more, give the room. Ends with a barrier of the block.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::order_frontier() {
  const uint32_t me = simt::thread();
  uint32_t* histogram = candidate_histogram(step_);
  Beam* unordered = reinterpret_cast<Beam*>(candidates().keys);  // and where the ranges are
#pragma unroll 1
  for (uint32_t i = me; i < kBinWords; i += kWarps * 32) histogram[i] = 0;
  simt::sync_block();
#pragma unroll 1
  for (uint32_t i = me; i < num_beams_; i += kWarps * 32) {
    Beam beam = beams()[i];
    beam.start = history(step_)[i];
    unordered[i] = beam;
    count_in_bin(histogram, rank_key(beam.score, 0));
  }
  simt::sync_block();
  begin_bins(histogram);
#pragma unroll 1
  for (uint32_t i = me; i < num_beams_; i += kWarps * 32) {
    const uint32_t bin = score_bin(rank_key(unordered[i].score, 0)), half = 16 * (bin & 1);
    const uint32_t at = simt::atomic_add(&histogram[bin >> 1], 1u << half) >> half & 0xffff;
    beams()[at] = unordered[i];
  }
  simt::sync_block();
  const uint32_t groups = lay_out(step_ + 1, 0, num_beams_, [&](uint32_t at) { return arrival(beams()[at]); });
  take_part(step_ + 1, 0, num_beams_, groups, batch_.part_groups);
}

// Makes of the counts of a histogram the places where the bins begin, the best bin first. Ends with a barrier of the block.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::begin_bins(uint32_t* histogram) {
  static_assert(kBinWords / 2 <= kWarps * 32, "two words a thread");
  const uint32_t me = simt::thread(), lane = simt::lane(), upper = kBinWords - 1 - 2 * me;
  const bool here = me < kBinWords / 2;
  const uint32_t words[2] = {here ? histogram[upper] : 0, here ? histogram[upper - 1] : 0};
  const uint32_t sum = (words[0] >> 16) + (words[0] & 0xffff) + (words[1] >> 16) + (words[1] & 0xffff);
  const uint32_t upto = inclusive_scan(sum);
  if (lane == 31) control().warp_sums[me >> 5] = upto;
  simt::sync_block();
  uint32_t at = simt::reduce_add(lane < (me >> 5) ? control().warp_sums[lane] : 0) + upto - sum;
#pragma unroll
  for (uint32_t i = 0; here && i < 2; ++i) {
    const uint32_t low = at + (words[i] >> 16);
    histogram[upper - i] = at << 16 | low;
    at = low + (words[i] & 0xffff);
  }
  simt::sync_block();
}

// Of beams [first, last), laid out with so many label groups, the first ones whose groups come to the limit are the next
// part; left in the control. Ends with a barrier of the block.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::take_part(uint32_t step, uint32_t first, uint32_t last, uint32_t groups,
                                                               uint32_t limit) {
  const uint32_t* starts = beam_starts(step);
  FrontierPart* part = &control().part;
  if (simt::thread() == 0) *part = {first, last, last, groups, limit};
  simt::sync_block();
#pragma unroll 1
  for (uint32_t i = first + simt::thread(); i < last; i += kWarps * 32) {
    const uint32_t end = i + 1 < last ? starts[i + 1] : groups;
    if (starts[i] < limit && end >= limit) part->last = i + 1, part->label_groups = end;
  }
  simt::sync_block();
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

// Lays out what the floors leave of the frontier behind the part that is through, and leaves the next part in the control.
// Ends with a barrier of the block.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::next_part() {
  const uint32_t me = simt::thread(), first = num_beams_, end = control().part.frontier_last;
  const uint32_t limit = control().part.limit;
  const bool has_floors = (control().floors[0] != 0 || is_last_) && (control().floors[1] != 0 || !can_end_);
  uint32_t* last = &control().part.frontier_last;
  simt::sync_block();
  if (me == 0) {
    *last = first;
    control().row_rises = 0;
  }
  simt::sync_block();
  // Log-probs by slot, those too whose slots extend nothing, so that a beam finds how many slots it can use.
  float* logprobs = table(step_).logprobs;
  bool rises = false;
#pragma unroll 1
  for (uint32_t slot = me; slot < batch_.num_slots; slot += kWarps * 32) {
    const uint64_t at = grid_ + static_cast<uint64_t>(step_) * batch_.num_slots + slot;
    const float logprob = load_logprob(at);
    logprobs[slot] = logprob;
    rises |= slot > 0 && !(load_logprob(at - 1) >= logprob);
  }
  if (rises) control().row_rises = 1;
  uint32_t wanted = first;
#pragma unroll 1
  for (uint32_t i = first + me; i < end; i += kWarps * 32)
    if (can_contribute(beams()[i].score)) wanted = i + 1;
  wanted = simt::reduce_max(wanted);
  if (simt::lane() == 0) simt::atomic_max(last, wanted);
  simt::sync_block();
  wanted = *last;
  const bool is_sorted = has_floors && !control().row_rises;
  const uint32_t groups = lay_out(step_, first, wanted, [&](uint32_t at) {
    Beam beam = beams()[at];
    beam.start = history(step_ - 1)[at];
    Arrival arrived = arrival(beam);
    const uint32_t usable = is_sorted ? usable_slots(beam.score) : batch_.num_slots;
    if ((arrived.groups & kAsks) || usable * batch_.search_cost < arrived.groups)
      arrived.groups = (usable > 0 ? usable : 1) | kAsks;  // every beam has a group
    return arrived;
  });
  take_part(step_, first, wanted, groups, has_floors ? kNoSlot : limit * kPartGrowth);
}

// How many slots of a row whose log-probs fall can lead a beam of this score past the floors.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::usable_slots(float beam_score) const {
  const float* logprobs = table(step_).logprobs;
  uint32_t low = 0, high = batch_.num_slots;
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = (low + high) >> 1;
    if (can_reach(beam_score + logprobs[middle]))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace flashtrie
