// Part of search_group.cuh: the exact n-th best of a pool, and pools cut down to their best.
#pragma once

namespace flashtrie {

// A pool is full: keep the best of both pools, exactly, and make their last ones floors.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::prune() {
  sum_chunks<kBlocks>(candidate_histogram(step_), combined(0), control().candidate_totals);
  sum_chunks<kBlocks>(result_histogram(), combined(1), control().result_totals);
  simt::sync_group<kBlocks>();
  const uint32_t* candidate_bins = kBlocks == 1 ? candidate_histogram(step_) : combined(0);
  const uint32_t* result_bins = kBlocks == 1 ? result_histogram() : combined(1);
  const BinCut candidate_cut = locate_cut(candidate_bins, control().candidate_totals, beam_width_);
  const BinCut result_cut = locate_cut(result_bins, control().result_totals, result_limit_);
  uint64_t cut = settle(candidates(), candidate_cut, beam_width_, 0);
  if (cut > candidate_floor_) candidate_floor_ = cut;
  simt::sync_group<kBlocks>();  // the tie list has been read everywhere
  cut = settle(results(), result_cut, result_limit_, 1);
  if (cut > result_floor_) result_floor_ = cut;
  compact(candidates(), candidate_histogram(step_), candidate_floor_);
  compact(results(), result_histogram(), result_floor_);
  simt::sync_group<kBlocks>();
}

// The least key among the n best of the group. All threads of the group; which tie list to use.
template <int kBlocks, bool kSpill>
FT_DEVICE uint64_t GroupSearch<kBlocks, kSpill>::settle(const Pool& pool, const BinCut& cut, uint32_t n, int which) {
  if (cut.all) return 0;
  if (cut.wanted == 0) return bin_start(cut.bin + 1);
  if (cut.in_bin > kMaxTies) return search_cut_outlined<kBlocks, kSpill>(batch_, shared_, SearchState(*this), n, which);
  const uint32_t count = *pool.count;
#pragma unroll 1
  for (uint32_t i = simt::thread(); i < count; i += simt::num_threads()) {
    const uint64_t key = pool.keys[i];
    if (score_bin(key) != cut.bin) continue;
    const uint32_t at = simt::atomic_add(&leader().num_ties[which], 1);
    for (int b = 0; b < kBlocks; ++b) simt::in_block<kBlocks>(ties(), b)[at] = key;
  }
  simt::sync_group<kBlocks>();
#pragma unroll 1
  for (uint32_t i = simt::thread(); i < cut.in_bin; i += simt::num_threads()) {
    const uint64_t key = ties()[i];
    uint32_t better = 0;
#pragma unroll 8
    for (uint32_t other = 0; other < cut.in_bin; ++other) better += ties()[other] > key;
    if (better == cut.wanted - 1) control().cut = key;
  }
  simt::sync_block();
  return control().cut;
}

// The n-th best of a block's few keys: a warp a key, compared with all others.
template <int kBlocks, bool kSpill>
FT_DEVICE uint64_t GroupSearch<kBlocks, kSpill>::nth_key(const uint64_t* keys, uint32_t count, uint32_t n) {
  const Comparison all(keys, count);
#pragma unroll 2
  for (uint32_t i = simt::thread() >> 5; i < count; i += simt::num_threads() >> 5) {
    const uint64_t key = keys[i];
    if (all.num_better(key) == n - 1) control().cut = key;
  }
  simt::sync_block();
  return control().cut;
}

// The same, whatever the keys are: one bit at a time. Only where very many scores are alike.
template <int kBlocks, bool kSpill>
FT_DEVICE uint64_t GroupSearch<kBlocks, kSpill>::search_cut(const Pool& pool, uint32_t n) {
  const uint32_t count = *pool.count;
  uint64_t cut = 0;
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t trial = cut | (uint64_t(1) << bit);
    uint32_t above = 0;
#pragma unroll 1
    for (uint32_t i = simt::thread(); i < count; i += simt::num_threads()) above += pool.keys[i] >= trial;
    if (group_sum(above) >= n) cut = trial;
  }
  return cut;
}

template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::group_sum(uint32_t value) {
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
  return group_count(&sums[turn]);
}

// Sum of a count over the blocks of the group.
template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::group_count(const uint32_t* count) const {
  if (kBlocks == 1) return *count;
  uint32_t total = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) total += *simt::in_block<kBlocks>(count, b);
  return total;
}

// Keeps the entries of this block whose key is at least the cut.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::compact(const Pool& pool, uint32_t* histogram, uint64_t cut) {
  const uint32_t me = simt::thread(), count = *pool.count;
  simt::sync_block();
  if (me == 0) *pool.count = 0;
#pragma unroll 1
  for (uint32_t i = me; i < kBinWords; i += simt::num_threads()) histogram[i] = 0;
#pragma unroll 1
  for (uint32_t from = 0; from < count; from += simt::num_threads()) {
    const uint32_t i = from + me;
    const bool here = i < count;
    const uint64_t key = here ? pool.keys[i] : 0;
    const uint32_t link = here ? pool.links()[i] : 0, first = here ? pool.first()[i] : 0, second = here ? pool.second()[i] : 0;
    simt::sync_block();  // what is written below has been read by now
    push(pool, histogram, here && key >= cut, key, link, first, second);
  }
  simt::sync_block();
}

}  // namespace flashtrie
