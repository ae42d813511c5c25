// Part of search_group.cuh: from the pool of results to the answer, best first.
#pragma once

namespace flashtrie {

constexpr uint32_t kCrowdedBin = 64;  // past this many hits a bin, comparing them all is no longer cheap

template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::finish() {
  if (kBlocks > 1) {
    share_totals(1);
    simt::sync_group<kBlocks>();
  }
  const uint32_t found = group_entries(1);
  uint64_t cut = 0;
  uint32_t num_gathered = found;
  if (found > result_limit_ && found > kCompareAll) {
    cut = pool_cut_outlined<kBlocks, kWarps, kSpill>(batch_, shared_, state(), 1, result_limit_, true);
    num_gathered = result_limit_ - control().wanted + (cut == bin_start(control().bin) ? control().in_bin : control().wanted);
  }
  if (num_gathered > kCompareAll)  // `sort` counts in it
    for (uint32_t i = simt::thread(); i < kBinWords; i += simt::num_threads()) candidate_histogram(0)[i] = 0;
  gather(cut);
  simt::sync_group<kBlocks>();
  if (simt::rank<kBlocks>() != 0) return;
  const uint32_t num_hits = found < result_limit_ ? found : result_limit_;
  if (simt::thread() == 0) {
    batch_.num_hits[query_] = num_hits;
    batch_.bad_slots[query_] = ~control().bad_slot;
    if (num_hits == 0) batch_.num_tokens[query_] = 0;
  }
  if (num_hits == 0) return;
  if (num_gathered <= kCompareAll)
    rank_all(num_gathered, num_hits);
  else
    sort(num_gathered);
  write_hits(num_hits);
}

// The results not below the cut, of all blocks, into the leader's candidate pool, which nobody needs any more.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::gather(uint64_t cut) {
  SearchControl& to = *simt::in_block<kBlocks>(&control(), 0);
  const uint32_t count = num_entries(1);
#pragma unroll 1
  for (uint32_t from = simt::thread() & ~31u; from < count; from += simt::num_threads()) {
    const uint32_t i = from + simt::lane();
    const uint64_t key = i < count ? results().keys[i] : 0;
    const bool wanted = i < count && key >= cut;
    const uint32_t votes = simt::ballot(wanted);
    if (votes == 0) continue;
    const uint32_t score = static_cast<uint32_t>(key >> 32);
    const uint32_t best = simt::reduce_max(wanted ? score : 0), worst = simt::reduce_max(wanted ? ~score : 0);
    uint32_t at = 0;
    if (simt::lane() == 0) {
      at = simt::atomic_add(&to.num_gathered, simt::count_ones(votes));
      simt::atomic_max(&to.best_score, best);
      simt::atomic_max(&to.worst_score, worst);
    }
    at = simt::shuffle(at, 0) + simt::count_ones(votes & simt::lanes_below());
    if (!wanted) continue;
    simt::in_block<kBlocks>(candidates().keys, 0)[at] = key;
    // Their scores and depths take the places of ranges.
    const ResultScore score_of_hit = results().scores()[i];
    simt::in_block<kBlocks>(candidates().ranges(), 0)[at] = {float_bits(score_of_hit.total), results().depths()[i]};
    simt::in_block<kBlocks>(candidates().links(), 0)[at] = score_of_hit.link;
  }
}

// Leaves the places of the best hits, best first, in the second half of the bitmaps' memory: a warp a hit, compared with
// all others.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::rank_all(uint32_t num_gathered, uint32_t num_hits) {
  uint16_t* sorted = reinterpret_cast<uint16_t*>(bitmaps()) + kMaxBeamWidth;
  const uint64_t* keys = candidates().keys;
  const Comparison all(keys, num_gathered);
#pragma unroll 2
  for (uint32_t hit = simt::thread() >> 5; hit < num_gathered; hit += simt::num_threads() >> 5) {
    const uint32_t better = all.num_better(keys[hit]);
    if (simt::lane() == 0 && better < num_hits) sorted[better] = static_cast<uint16_t>(hit);
  }
  simt::sync_block();
}

// Leaves the places of the gathered hits, best first, in the second half of the bitmaps' memory. Bins between the
// worst and the best score, each hit at its bin's place, then a comparison with the few others in the bin.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::sort(uint32_t count) {
  uint16_t* by_bin = reinterpret_cast<uint16_t*>(bitmaps());
  uint16_t* sorted = by_bin + kMaxBeamWidth;
  uint16_t* turns = sorted;  // of a hit within its bin; read before `sorted` is written
  const uint64_t* keys = candidates().keys;
  const uint32_t me = simt::thread(), lane = simt::lane();
  const uint32_t worst = ~control().worst_score, span = control().best_score - worst;
  int shift = 0;
#pragma unroll 1
  while ((span >> shift) >= kBins) ++shift;
  auto bin_of = [&](uint64_t key) { return (static_cast<uint32_t>(key >> 32) - worst) >> shift; };
  uint32_t* counts = candidate_histogram(0);
  uint16_t* begins = reinterpret_cast<uint16_t*>(candidate_histogram(1));

  uint32_t most = 0;
#pragma unroll 1
  for (uint32_t i = me; i < count; i += simt::num_threads()) {
    const uint32_t bin = bin_of(keys[i]), half = 16 * (bin & 1);
    const uint32_t turn = (simt::atomic_add(&counts[bin >> 1], 1u << half) >> half) & 0xffff;
    turns[i] = static_cast<uint16_t>(turn);
    most = turn + 1 > most ? turn + 1 : most;
  }
  most = simt::reduce_max(most);
  if (lane == 0) simt::atomic_max(&control().most_in_bin, most);
  simt::sync_block();
  if (control().most_in_bin > kCrowdedBin) 
    return sort_crowded_outlined<kBlocks, kWarps, kSpill>(batch_, shared_, SearchState(*this), count);
  sum_chunks(counts, control().result_totals);
  simt::sync_block();
#pragma unroll 1
  for (uint32_t chunk = me >> 5; chunk < kChunks; chunk += simt::num_threads() >> 5) {
    const uint32_t above = simt::reduce_add(lane > chunk ? control().result_totals[lane] : 0);
    const uint32_t at = chunk * kChunkWords + kChunkWords - 1 - lane;
    const uint32_t upper = counts[at] >> 16, lower = counts[at] & 0xffff;
    const uint32_t begin = above + inclusive_scan(upper + lower) - upper - lower;
    begins[2 * at + 1] = static_cast<uint16_t>(begin);
    begins[2 * at] = static_cast<uint16_t>(begin + upper);
  }
  simt::sync_block();
#pragma unroll 1
  for (uint32_t i = me; i < count; i += simt::num_threads())
    by_bin[begins[bin_of(keys[i])] + turns[i]] = static_cast<uint16_t>(i);
  simt::sync_block();
#pragma unroll 1
  for (uint32_t at = me; at < count; at += simt::num_threads()) {
    const uint64_t key = keys[by_bin[at]];
    const uint32_t bin = bin_of(key), begin = begins[bin], end = bin > 0 ? begins[bin - 1] : count;
    uint32_t better = 0;
#pragma unroll 4
    for (uint32_t other = begin; other < end; ++other) better += keys[by_bin[other]] > key;
    sorted[begin + better] = by_bin[at];
  }
  simt::sync_block();
}

// The same by a bitonic sort, for hits whose scores are much alike.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::sort_crowded(uint32_t count) {
  uint16_t* sorted = reinterpret_cast<uint16_t*>(bitmaps()) + kMaxBeamWidth;
  const uint64_t* keys = candidates().keys;
  uint32_t size = 2;
#pragma unroll 1
  while (size < count) size *= 2;
#pragma unroll 1
  for (uint32_t i = simt::thread(); i < size; i += simt::num_threads()) sorted[i] = static_cast<uint16_t>(i);
  simt::sync_block();
  auto key_at = [&](uint32_t place) { return place < count ? keys[place] : 0; };
#pragma unroll 1
  for (uint32_t run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (uint32_t by = run / 2; by > 0; by /= 2) {
#pragma unroll 1
      for (uint32_t i = simt::thread(); i < size / 2; i += simt::num_threads()) {
        const uint32_t left = 2 * i - (i & (by - 1)), right = left + by;
        const uint16_t a = sorted[left], b = sorted[right];
        const bool descending = (left & run) == 0;
        if ((key_at(a) < key_at(b)) == descending) {
          sorted[left] = b;
          sorted[right] = a;
        }
      }
      simt::sync_block();
    }
  }
}

template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::write_hits(uint32_t num_hits) {
  const uint16_t* sorted = reinterpret_cast<const uint16_t*>(bitmaps()) + kMaxBeamWidth;
  const uint32_t me = simt::thread(), lane = simt::lane(), num_warps = simt::num_threads() >> 5;
  const uint64_t first_hit = static_cast<uint64_t>(query_) * batch_.result_capacity;
  uint32_t* tokens = batch_.hit_tokens + first_hit * batch_.max_depth;
  uint32_t written = 0;  // tokens of the rounds before
#pragma unroll 1
  for (uint32_t from = 0; from < num_hits; from += simt::num_threads()) {
    const bool here = from + me < num_hits;
    const uint32_t place = here ? sorted[from + me] : 0;
    const ChildRange hit = here ? candidates().ranges()[place] : ChildRange{};  // score as bits, depth
    const uint32_t depth = hit.last;
    const uint64_t key = here ? candidates().keys[place] : 0;
    // Asked for now, needed last.
    const NodeLine* line = &batch_.trie.lines[here ? key_node(key) >> 6 : 0];
    const uint64_t terminal = simt::load_word(&line->terminal);
    const uint32_t rank = simt::load_word(&line->terminal_rank);
    const uint32_t upto = inclusive_scan(depth);
    if (lane == 31) control().warp_sums[me >> 5] = upto;
    simt::sync_block();
    const uint32_t sum = lane < num_warps ? control().warp_sums[lane] : 0;
    const uint32_t end = written + simt::reduce_add(lane < (me >> 5) ? sum : 0) + upto;
    written += simt::reduce_add(sum);
    if (here) {
      const uint64_t at = first_hit + from + me;
      write_tokens(candidates().links()[place], depth, tokens + end - depth);
      batch_.key_ids[at] = rank + popcount64(terminal & ((uint64_t(1) << (key_node(key) & 63)) - 1));
      batch_.scores[at] = bits_float(hit.first);
      batch_.normalised_scores[at] = key_score(key);
      batch_.token_ends[at] = end;
    }
    simt::sync_block();
  }
  if (me == 0) batch_.num_tokens[query_] = written;
}

// Follows the parents back to the root, eight steps at a time so that the reads of the tokens overlap.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::write_tokens(uint32_t link, uint32_t depth, uint32_t* to) const {
  constexpr uint32_t kAtOnce = 8;
  if (batch_.token_bytes != 4) return write_other_tokens_outlined<kBlocks, kWarps, kSpill>(batch_, shared_, state(), link, depth, to);
  const uint32_t* grid = static_cast<const uint32_t*>(tokens_) + grid_;
#pragma unroll 1
  for (;;) {
    uint32_t tokens[kAtOnce];
#pragma unroll
    for (uint32_t back = 1; back <= kAtOnce; ++back) {
      if (back > depth) continue;
      tokens[back - 1] = grid[(depth - back) * batch_.num_slots + (link & (kMaxSlots - 1))];
      if (depth > back) link = parent_link(link, depth - back - 1);
    }
#pragma unroll
    for (uint32_t back = 1; back <= kAtOnce; ++back)
      if (back <= depth) to[depth - back] = tokens[back - 1];
    if (depth <= kAtOnce) return;
    depth -= kAtOnce;
  }
}

// The same for tokens of other widths.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kSpill>::write_other_tokens(uint32_t link, uint32_t depth, uint32_t* to) const {
#pragma unroll 1
  for (;;) {
    --depth;
    to[depth] = load_token(grid_ + static_cast<uint64_t>(depth) * batch_.num_slots + (link & (kMaxSlots - 1)));
    if (depth == 0) return;
    link = parent_link(link, depth - 1);
  }
}

// Where a beam's parent came from; `row` says at which step.
template <int kBlocks, int kWarps, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kSpill>::parent_link(uint32_t link, uint32_t row) const {
  const uint32_t block = link >> kLinkBlockShift & (kBlocks - 1);
  return simt::in_block<kBlocks>(history(row), block)[link >> kLinkBeamShift];
}

}  // namespace flashtrie
