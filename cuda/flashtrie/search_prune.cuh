// Part of search_group.cuh: the exact n-th best of the group's pools, and pools cut down to their best.
#pragma once

namespace flashtrie {

// The least key among the beam_width best candidates of the group; 0 where there are no more. All threads.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint64_t GroupSearch<kBlocks, kWarps, kMode>::candidate_cut(uint32_t num_candidates) {
  if (num_candidates <= beam_width_) return 0;
  if (kBlocks == 1 && num_candidates <= kCompareAll) return nth_key(candidates().keys, num_candidates, beam_width_);
  return pool_cut_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), 0, beam_width_);
}

// The same for either pool (0 candidates, 1 results). In a cluster share_totals comes before, and a barrier.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint64_t GroupSearch<kBlocks, kWarps, kMode>::pool_cut(int which, uint32_t n) {
  if (kBlocks == 1) {
    share_totals(which);
    simt::sync_block();
  }
  if ((simt::thread() >> 5) == 0) locate(which, n);
  simt::sync_block();
  const uint32_t bin = control().bin, wanted = control().wanted, in_bin = control().in_bin;
  if (wanted == 0) return bin_start(bin + 1);
  if (wanted >= in_bin) return bin_start(bin);
  if (in_bin > kMaxTies) return search_cut_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), n, which);
  const uint64_t* keys = which == 0 ? candidates().keys : results().keys;
  const uint32_t count = num_entries(which);
#pragma unroll 2
  for (uint32_t i = simt::thread(); i < count; i += simt::num_threads()) {
    const uint64_t key = keys[i];
    if (score_bin(key) != bin) continue;
    const uint32_t at = control().tie_base + simt::atomic_add(&control().num_ties[which], 1);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) simt::in_block<kBlocks>(ties(), b)[at] = key;
  }
  simt::sync_group<kBlocks>();
#pragma unroll 1
  for (uint32_t i = simt::thread(); i < in_bin; i += simt::num_threads()) {
    const uint64_t key = ties()[i];
    uint32_t better = 0;
#pragma unroll 8
    for (uint32_t other = 0; other < in_bin; ++other) better += ties()[other] > key;
    if (better == wanted - 1) control().cut = key;
  }
  simt::sync_block();
  return control().cut;
}

// Where the n-th best of the group lies, from the totals that share_totals told. One warp of each block. In a cluster the
// blocks' histograms are read where they are, 32 words of each.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE BinCut GroupSearch<kBlocks, kWarps, kMode>::group_cut(int which, uint32_t n) const {
  uint32_t* histogram = histogram_of(which);
  uint32_t mine = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) mine += control().chunk_totals[which][b][kChunks - 1 - simt::lane()];
  return locate_cut(
      [&](uint32_t at) {
        uint32_t words[kBlocks], sum = 0;  // all reads first: they overlap
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) words[b] = *simt::in_block<kBlocks>(&histogram[at], b);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) sum += words[b];
        return sum;
      },
      mine, n);
}

// Leaves in the control where the n-th best lies: its bin, how many of it are wanted of how many, and how many of those are
// in blocks before this one. One warp of each block; there are more than n.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::locate(int which, uint32_t n) {
  const BinCut cut = group_cut(which, n);
  const uint32_t lane = simt::lane();
  uint32_t base = 0;
  if (kBlocks > 1 && lane < simt::rank<kBlocks>())
    base = (*simt::in_block<kBlocks>(&histogram_of(which)[cut.bin >> 1], lane) >> 16 * (cut.bin & 1)) & 0xffff;
  if (kBlocks > 1) base = simt::reduce_add(base);
  if (lane != 0) return;
  control().bin = cut.bin;
  control().wanted = cut.wanted;
  control().in_bin = cut.in_bin;
  control().tie_base = base;
}

// Tells every block of the group the totals of this block's chunks, and its counts. A barrier of the block before, of the
// group behind.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::share_totals(int which) {
  const uint32_t* histogram = histogram_of(which);
  const uint32_t rank = simt::rank<kBlocks>(), lane = simt::lane();
#pragma unroll 1
  for (uint32_t chunk = simt::thread() >> 5; chunk < kChunks; chunk += kWarps) {
    const uint32_t word = histogram[chunk * kChunkWords + lane];
    const uint32_t total = simt::reduce_add((word & 0xffff) + (word >> 16));
    if (lane < kBlocks) *simt::in_block<kBlocks>(&control().chunk_totals[which][rank][chunk], lane) = total;
  }
  if (simt::thread() < kBlocks) *simt::in_block<kBlocks>(&control().group_counts[rank], lane) = num_entries(0) | num_entries(1) << 16;
}

// Entries of a pool over the group, from the counts that share_totals told.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::group_entries(int which) const {
  if (kBlocks == 1) return num_entries(which);
  uint32_t sum = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const uint32_t counts = control().group_counts[b];
    sum += which == 0 ? counts & 0xffff : counts >> 16;
  }
  return sum;
}

// A pool is full: keep the best of both pools, exactly, and make their last ones floors.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::prune() {
  const uint32_t limits[2] = {beam_width_, result_limit_};
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    share_totals(which);
    simt::sync_group<kBlocks>();
    const uint64_t cut = group_entries(which) > limits[which] ? pool_cut(which, limits[which]) : 0;
    simt::sync_group<kBlocks>();  // ties and histograms have been read everywhere
    if (simt::thread() == 0 && cut > control().floors[which]) control().floors[which] = cut;
    simt::sync_block();
    compact(which);
    simt::sync_group<kBlocks>();
  }
}

// The n-th best of a block's few keys: a warp a key, compared with all others.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint64_t GroupSearch<kBlocks, kWarps, kMode>::nth_key(const uint64_t* keys, uint32_t count, uint32_t n) {
  const Comparison all(keys, count);
#pragma unroll 2
  for (uint32_t i = simt::thread() >> 5; i < count; i += kWarps) {
    const uint64_t key = keys[i];
    if (all.num_better(key) == n - 1) control().cut = key;
  }
  simt::sync_block();
  return control().cut;
}

// The same, whatever the keys are: one bit at a time. Only where very many scores are alike.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint64_t GroupSearch<kBlocks, kWarps, kMode>::search_cut(int which, uint32_t n) {
  const uint64_t* keys = which == 0 ? candidates().keys : results().keys;
  const uint32_t count = num_entries(which);
  uint64_t cut = 0;
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t trial = cut | (uint64_t(1) << bit);
    uint32_t above = 0;
#pragma unroll 1
    for (uint32_t i = simt::thread(); i < count; i += simt::num_threads()) above += keys[i] >= trial;
    if (group_sum(above) >= n) cut = trial;
  }
  return cut;
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::group_sum(uint32_t value) {
  uint32_t* sums = control().sums;
  // Three sums take turns: one is added to, one may still be read, one is cleared.
  const uint32_t turn = control().sum_turn;
  value = simt::reduce_add(value);
  simt::sync_block();
  if (simt::lane() == 0) simt::atomic_add(&sums[turn], value);
  if (simt::thread() == 0) {
    sums[(turn + 1) % 3] = 0;
    control().sum_turn = (turn + 1) % 3;
  }
  simt::sync_group<kBlocks>();
  uint32_t total = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) total += *simt::in_block<kBlocks>(&sums[turn], b);
  return total;
}

// Keeps the entries of this block's pool that reach its floor.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::compact(int which) {
  uint64_t* keys = which == 0 ? candidates().keys : results().keys;
  uint32_t* histogram = histogram_of(which);
  const uint64_t floor = control().floors[which];
  uint32_t* counter = which == 0 ? num_candidates() : &control().num_results;
  const uint32_t me = simt::thread(), count = *counter;
  simt::sync_block();
  if (me == 0) *counter = 0;
#pragma unroll 1
  for (uint32_t i = me; i < kBinWords; i += simt::num_threads()) histogram[i] = 0;
#pragma unroll 1
  for (uint32_t from = 0; from < count; from += simt::num_threads()) {
    const uint32_t i = from + me;
    const bool stays = i < count && keys[i] >= floor;
    const uint64_t key = stays ? keys[i] : 0;
    const ChildRange range = stays && which == 0 ? candidates().ranges()[i] : ChildRange{};
    const uint32_t link = stays && which == 0 ? candidates().links()[i] : 0;
    const ResultScore score = stays && which == 1 ? results().scores()[i] : ResultScore{};
    const uint16_t depth = stays && which == 1 ? results().depths()[i] : 0;
    simt::sync_block();  // what is written below has been read by now
    const uint32_t votes = simt::ballot(stays);
    uint32_t first = 0;
    if (simt::lane() == 0) first = simt::atomic_add(counter, simt::count_ones(votes));
    first = simt::shuffle(first, 0);
    if (!stays) continue;
    const uint32_t at = first + simt::count_ones(votes & simt::lanes_below());
    keys[at] = key;
    count_in_bin(histogram, key);
    if (which == 0) {
      candidates().ranges()[at] = range;
      candidates().links()[at] = link;
    } else {
      results().scores()[at] = score;
      results().depths()[at] = depth;
    }
  }
  simt::sync_block();
}

}  // namespace flashtrie
