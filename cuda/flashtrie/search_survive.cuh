// Part of search_group.cuh: from the candidates of a step to the frontier of the next.
//
// In a cluster every block keeps a share of the frontier. A candidate belongs to the block that judged it; its survivors a
// block deals out to all blocks in turn, so that all have as many. Each arrives at a place that the sender alone writes.
#pragma once

namespace flashtrie {

// Whether one block's frontier can be dealt without a second pass: beams and label groups are counted in one word.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kSpill>::deals_directly() const {
  const uint32_t scanned = batch_.scan_limit / 8 + 2, most = scanned > batch_.num_slots ? scanned : batch_.num_slots;
  return kBlocks == 1 && static_cast<uint64_t>(beam_width_) * most < 1u << (32 - kBeamBits);
}

// The candidates not below the cut become the frontier. Ends with a barrier.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::deal(uint64_t cut) {
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
    beams()[beam] = {key_score(key), range.first, range.last, start};
    beam_starts(step_ + 1)[beam] = start;
    history(step_)[beam] = link;
    note_windows(beam, start, groups);
  }
  simt::sync_block();
  num_beams_ = *frontier & ((1u << kBeamBits) - 1);
  num_label_groups_ = *frontier >> kBeamBits;
}

// Notes a beam in the windows whose first label group is one of its.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::note_windows(uint32_t beam, uint32_t start, uint32_t groups) {
#pragma unroll 1
  for (uint32_t window = (start + 31) >> 5; window < kWindowPlaces && window * 32 < start + groups; ++window)
    windows()[window] = static_cast<uint16_t>(beam);
}

// Deals out the candidates not below the cut. A barrier of the group follows.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::survive(uint64_t cut) {
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

// Makes a frontier of what arrived: where each beam's label groups begin, which beam each window begins with, and where each
// beam comes from. Ends with a barrier of the block.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::arrange() {
  const uint32_t me = simt::thread(), lane = simt::lane();
  uint32_t received[kBlocks], num_beams = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    received[b] = kBlocks == 1 ? control().num_survivors : control().received[b];
    num_beams += received[b];
  }
  uint32_t groups_before = 0;
#pragma unroll 1
  for (uint32_t from = 0; from < num_beams; from += kWarps * 32) {
    const uint32_t at = from + me;
    const bool here = at < num_beams;
    uint32_t place = at;
    if (kBlocks > 1) {
      uint32_t before = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (at >= before && at < before + received[b]) place = b * (batch_.beam_capacity / kBlocks) + at - before;
        before += received[b];
      }
    }
    Beam beam = here ? (kBlocks == 1 ? beams()[place] : arrivals()[place]) : Beam{};
    const uint32_t link = beam.start;
    const uint32_t groups = here ? num_groups({beam.first, beam.last}) : 0;
    const uint32_t upto = inclusive_scan(groups);
    if (lane == 31) control().warp_sums[me >> 5] = upto;
    simt::sync_block();
    const uint32_t sum = lane < kWarps ? control().warp_sums[lane] : 0;
    beam.start = groups_before + simt::reduce_add(lane < (me >> 5) ? sum : 0) + upto - groups;
    groups_before += simt::reduce_add(sum);
    if (here) {
      beams()[at] = beam;
      beam_starts(step_ + 1)[at] = beam.start;
      history(step_)[at] = link;
      note_windows(at, beam.start, groups);
    }
    if (from + kWarps * 32 < num_beams) simt::sync_block();  // the sums have been read
  }
  if (me < 32) beam_starts(step_ + 1)[num_beams + me] = kNoSlot;
  num_beams_ = num_beams;
  num_label_groups_ = groups_before;
  simt::sync_block();
}

}  // namespace flashtrie
