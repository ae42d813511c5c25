// Part of search_group.cuh: from the candidates of a step to the frontier of the next.
//
// In a cluster every block keeps a share of the frontier. A candidate belongs to the block that judged it; its survivors a
// block deals out to all blocks in turn, so that all have as many. Each arrives at a place that the sender alone writes.
#pragma once

namespace flashtrie {

// Whether one block's frontier can be dealt without a second pass: beams and label groups are counted in one word.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::deals_directly() const {
  const uint32_t scanned = batch_.scan_limit / 8 + 2, most = scanned > batch_.num_slots ? scanned : batch_.num_slots;
  return kBlocks == 1 && static_cast<uint64_t>(beam_width_) * most < 1u << (32 - kBeamBits);
}

// The candidates not below the cut become the frontier. Ends with a barrier.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::deal(uint64_t cut) {
  const uint32_t count = num_entries(0), lane = simt::lane();
  uint32_t* frontier = &control().frontier[(step_ + 1) & 1];
#pragma unroll 1
  for (uint32_t from = simt::thread() & ~31u; from < count; from += simt::num_threads()) {
    const uint32_t i = from + lane;
    const uint64_t key = i < count ? candidates().keys[i] : 0;
    const bool survives = i < count && key >= cut;
    const uint32_t votes = simt::ballot(survives);
    if (votes == 0) continue;
    const ChildRange range = survives ? candidates().ranges()[i] : ChildRange{1, 1};
    const uint32_t link = survives ? candidates().links()[i] : 0;
    const uint32_t groups = survives ? num_groups(range) : 0;
    const uint32_t upto = inclusive_scan(groups);
    uint32_t base = 0;
    if (lane == 31) base = simt::atomic_add(frontier, upto << kBeamBits | simt::count_ones(votes));
    base = simt::shuffle(base, 31);
    if (!survives) continue;
    const uint32_t beam = (base & ((1u << kBeamBits) - 1)) + simt::count_ones(votes & simt::lanes_below());
    const uint32_t start = (base >> kBeamBits) + upto - groups;
    beams()[beam] = {key_score(key), range.first, range.last, start | (is_wide(range) ? kAsks : 0)};
    beam_starts(step_ + 1)[beam] = start;
    history(step_)[beam] = link;
    note_windows(beam, start, groups);
  }
  simt::sync_block();
  num_beams_ = *frontier & ((1u << kBeamBits) - 1);
  num_label_groups_ = *frontier >> kBeamBits;
}

// Notes a beam in the windows whose first label group is one of its.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::note_windows(uint32_t beam, uint32_t start, uint32_t groups) {
#pragma unroll 1
  for (uint32_t window = (start + 31) >> 5; window < kWindowPlaces && window * 32 < start + groups; ++window)
    windows()[window] = static_cast<uint16_t>(beam);
}

// Deals out the candidates not below the cut. A barrier of the group follows.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::survive(uint64_t cut) {
  const uint32_t count = num_entries(0), lane = simt::lane(), rank = simt::rank<kBlocks>();
#pragma unroll 1
  for (uint32_t from = simt::thread() & ~31u; from < count; from += simt::num_threads()) {
    const uint32_t i = from + lane;
    const uint64_t key = i < count ? candidates().keys[i] : 0;
    const bool survives = i < count && key >= cut;
    const uint32_t votes = simt::ballot(survives);
    if (votes == 0) continue;
    uint32_t base = 0;
    if (lane == 0) base = simt::atomic_add(&control().num_survivors, simt::count_ones(votes));
    base = simt::shuffle(base, 0);
    if (kBlocks > 1 && lane < kBlocks) {  // what block `lane` has got from this one by now
      const uint32_t upto = base + simt::count_ones(votes), first = (lane - rank) % kBlocks;
      const uint32_t sent = upto > first ? (upto - first + kBlocks - 1) / kBlocks : 0;
      simt::atomic_max(simt::in_block<kBlocks>(&control().received[rank], lane), sent);
    }
    if (!survives) continue;
    const uint32_t place = base + simt::count_ones(votes & simt::lanes_below());
    const ChildRange range = candidates().ranges()[i];
    const Beam beam = {key_score(key), range.first, range.last, candidates().links()[i]};
    if (kBlocks == 1) {
      beams()[place] = beam;
    } else {
      const uint32_t at = rank * (batch_.beam_capacity / kBlocks) + place / kBlocks;
      *simt::in_block<kBlocks>(&arrivals()[at], (place + rank) % kBlocks) = beam;
    }
  }
}

// Makes a frontier of what arrived. Ends with a barrier of the block.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::arrange() {
  uint32_t num_beams = 0;
  if (kBlocks == 1) num_beams = control().num_survivors;
#pragma unroll
  for (int b = 0; kBlocks > 1 && b < kBlocks; ++b) num_beams += control().received[b];
  num_beams_ = num_beams;
  num_label_groups_ = lay_out(step_ + 1, 0, num_beams, [&](uint32_t at) {
    if (kBlocks == 1) return arrival(beams()[at]);
    uint32_t place = at, before = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t received = control().received[b];
      if (at >= before && at < before + received) place = b * (batch_.beam_capacity / kBlocks) + at - before;
      before += received;
    }
    return arrival(arrivals()[place]);
  });
}

// A beam on its way, whose start is its link.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE typename GroupSearch<kBlocks, kWarps, kMode>::Arrival GroupSearch<kBlocks, kWarps, kMode>::arrival(
    const Beam& beam) const {
  const ChildRange range = {beam.first, beam.last};
  return {beam, num_groups(range) | (is_wide(range) ? kAsks : 0), 0};
}

// Lays out beams [first, last) of a step's frontier as `arrival_at` gives them: where their label groups begin, counted from
// the first beam's, and which beam each window begins with. Returns the number of label groups. Ends with a barrier
// of the block.
template <int kBlocks, int kWarps, Mode kMode>
template <typename ArrivalAt>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::lay_out(uint32_t step, uint32_t first, uint32_t last,
                                                                 const ArrivalAt& arrival_at) {
  const uint32_t me = simt::thread(), lane = simt::lane();
  uint32_t groups_before = 0;
#pragma unroll 1
  for (uint32_t from = first; from < last; from += kWarps * 32) {
    const uint32_t at = from + me;
    const bool here = at < last;
    const Arrival arrived = here ? arrival_at(at) : Arrival{};
    const uint32_t groups = arrived.groups & ~kAsks;
    const uint32_t upto = inclusive_scan(groups);
    if (lane == 31) control().warp_sums[me >> 5] = upto;
    simt::sync_block();
    const uint32_t sum = lane < kWarps ? control().warp_sums[lane] : 0;
    const uint32_t start = groups_before + simt::reduce_add(lane < (me >> 5) ? sum : 0) + upto - groups;
    groups_before += simt::reduce_add(sum);
    if (here) {
      const uint32_t shown = kMode == kPairs ? (start - arrived.done) & ~kAsks : start;
      beams()[at] = {arrived.beam.score, arrived.beam.first, arrived.beam.last, shown | (arrived.groups & kAsks)};
      beam_starts(step)[at] = start;
      history(step - 1)[at] = arrived.beam.start;
      note_windows(at, start, groups);
    }
    if (from + kWarps * 32 < last) simt::sync_block();  // the sums have been read
  }
  if (me < 32) beam_starts(step)[last + me] = kNoSlot;
  simt::sync_block();
  return groups_before;
}

}  // namespace flashtrie
