// Part of search_group.cuh: from the pools of results to the answer, best first.
//
// The score bins already say where a result belongs, but for the order within its bin: so many stand in the bins above, so
// many of its own in the blocks before. Each block of a cluster writes a share of the answer: the bins that begin in its
// share of the places. Results go to the block that writes them, to these places; there the few that share a bin are compared.
#pragma once

namespace flashtrie {

constexpr uint32_t kCrowdedBin = 64;  // past this many hits a bin, comparing them all is no longer cheap

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::finish() {
  place_bins();
  const uint32_t found = control().num_found, num_hits = found < result_limit_ ? found : result_limit_;
  const bool is_crowded = control().most_in_bin > kCrowdedBin, leads = simt::rank<kBlocks>() == 0;
  if (is_crowded)
    gather_crowded_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), found);
  else
    deliver();
  simt::sync_group<kBlocks>();
  if (leads && simt::thread() == 0) {
    batch_.num_hits[query_] = num_hits;
    batch_.bad_slots[query_] = ~control().bad_slot;
    if (num_hits == 0) batch_.num_tokens[query_] = 0;
  }
  if (num_hits == 0) return;
  OwnHits own = {0, 0, leads ? num_hits : 0, 0};
  if (!is_crowded)
    own = order(num_hits);
  else if (leads)
    sort_crowded_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), num_hits);
  write_hits(own, num_hits);
}

// Where the bins begin among all results, and where this block's share of each; both take the place of the candidates'
// histograms. Two words a thread, from the best bin down. The last step's barrier completed all histograms. Ends with a
// barrier of the block.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::place_bins() {
  static_assert(kBinWords / 2 <= kWarps * 32, "two words a thread");
  const uint32_t me = simt::thread(), lane = simt::lane(), upper = kBinWords - 1 - 2 * me;
  const bool here = me < kBinWords / 2;
  uint32_t words[2] = {0, 0}, before[2] = {0, 0};
  if (here) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      uint32_t theirs[kBlocks];  // all reads first: they overlap
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) theirs[b] = *simt::in_block<kBlocks>(&result_histogram()[upper - i], b);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (static_cast<uint32_t>(b) == simt::rank<kBlocks>()) before[i] = words[i];
        words[i] += theirs[b];
      }
    }
  }
  const uint32_t counts[4] = {words[0] >> 16, words[0] & 0xffff, words[1] >> 16, words[1] & 0xffff};
  const uint32_t sum = counts[0] + counts[1] + counts[2] + counts[3];
  const uint32_t upto = inclusive_scan(sum);
  if (lane == 31) control().warp_sums[me >> 5] = upto;
  simt::sync_block();
  const uint32_t warp_sum = lane < kWarps ? control().warp_sums[lane] : 0;
  const uint32_t found = simt::reduce_add(warp_sum);
  if (me == 0) control().num_found = found;
  const uint32_t num_hits = found < result_limit_ ? found : result_limit_, share = hit_share(num_hits);
  const uint32_t own = simt::rank<kBlocks>() * share;  // the first place of this block's share
  const uint32_t own_begin = own < num_hits ? own : num_hits, own_end = own + share < num_hits ? own + share : num_hits;
  uint32_t at = simt::reduce_add(lane < (me >> 5) ? warp_sum : 0) + upto - sum, most = 0;
#pragma unroll
  for (uint32_t i = 0; here && i < 2; ++i) {
    const uint32_t high = at, low = at + counts[2 * i];
    bin_starts()[upper - i] = high << 16 | low;
    bin_places()[upper - i] = (high << 16 | low) + before[i];
    // Only bins that the answer reaches into matter.
    if (high < result_limit_ && counts[2 * i] > most) most = counts[2 * i];
    if (low < result_limit_ && counts[2 * i + 1] > most) most = counts[2 * i + 1];
    at = low + counts[2 * i + 1];
    if (kBlocks > 1) {
      note_share(high, low, own_begin, own_end);
      note_share(low, at, own_begin, own_end);
    }
  }
  most = simt::reduce_max(most);
  if (lane == 0) simt::atomic_max(&control().most_in_bin, most);
  simt::sync_block();
}

// Where this block's share of the answer begins and ends, if a bin of the places [from, to) reaches there.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::note_share(uint32_t from, uint32_t to, uint32_t begin, uint32_t end) {
  if (from < begin && to >= begin) control().own_first = to;
  if (from < end && to >= end) control().own_end = to;
}

// Places of the answer that each block writes, but for bins that reach from one share into the next. The leader writes few
// hits by itself.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::hit_share(uint32_t num_hits) const {
  return kBlocks == 1 || num_hits < batch_.shared_hits ? num_hits : (num_hits + kBlocks - 1) / kBlocks;
}

// This block's results of the bins that the answer reaches into, to their places in the pools of candidates, which nobody
// needs any more.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::deliver() {
  const uint32_t count = num_entries(1), found = control().num_found;
  const uint32_t share = hit_share(found < result_limit_ ? found : result_limit_);
#pragma unroll 1
  for (uint32_t i = simt::thread(); i < count; i += kWarps * 32) {
    const uint64_t key = results().keys[i];
    const uint32_t bin = score_bin(key), half = 16 * (bin & 1);
    const uint32_t start = bin_starts()[bin >> 1] >> half & 0xffff;
    if (start >= result_limit_) continue;
    const uint32_t at = simt::atomic_add(&bin_places()[bin >> 1], 1u << half) >> half & 0xffff;
    const uint32_t block = kBlocks == 1 ? 0 : start / share;
    put_hit(block, at - block * share, key, i);
  }
}

// Result `i` of this block as a hit in another's pool: score and depth take the places of ranges.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::put_hit(uint32_t block, uint32_t at, uint64_t key, uint32_t i) {
  const ResultScore score = results().scores()[i];
  simt::in_block<kBlocks>(candidates().keys, block)[at] = key;
  simt::in_block<kBlocks>(candidates().ranges(), block)[at] = {float_bits(score.total), results().depths()[i]};
  simt::in_block<kBlocks>(candidates().links(), block)[at] = score.link;
}

// Leaves in `sorted` which of the hits of this block's share is the best, and so on, and says where in the answer they belong. Ends
// with a barrier of all blocks that have a share.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE typename GroupSearch<kBlocks, kWarps, kMode>::OwnHits GroupSearch<kBlocks, kWarps, kMode>::order(uint32_t num_hits) {
  const uint64_t* keys = candidates().keys;
  const uint32_t found = control().num_found, rank = simt::rank<kBlocks>(), share = hit_share(num_hits), base = rank * share;
  uint32_t first = 0, end = num_hits + kCrowdedBin < found ? num_hits + kCrowdedBin : found, tokens = 0;
  if (kBlocks > 1) {
    first = rank == 0 ? 0 : control().own_first != 0 ? control().own_first : found;
    end = control().own_end != 0 ? control().own_end : found;
  }
#pragma unroll 1
  for (uint32_t i = first + simt::thread(); i < end; i += kWarps * 32) {
    const uint64_t key = keys[i - base];
    const uint32_t bin = score_bin(key);
    const uint32_t begin = bin_start_of(bin), behind = bin > 0 ? bin_start_of(bin - 1) : found;
    if (kBlocks == 1 && (begin >= num_hits || i >= behind)) continue;  // behind the last bin delivered
    uint32_t better = begin;
#pragma unroll 2
    for (uint32_t other = begin; other < behind; ++other) better += keys[other - base] > key;
    if (better < num_hits) sorted()[better - base] = static_cast<uint16_t>(i - base);
    if (kBlocks > 1) tokens += candidates().ranges()[i - base].last;
  }
  if (share < num_hits) {
    tokens = simt::reduce_add(tokens);
    if (simt::lane() > rank && simt::lane() < kBlocks && tokens != 0)
      simt::atomic_add(simt::in_block<kBlocks>(&control().own_tokens[rank], simt::lane()), tokens);
  }
  uint32_t before = 0;
  if (share < num_hits) {
    simt::sync_group<kBlocks>();
    for (uint32_t b = 0; b < rank; ++b) before += control().own_tokens[b];
  } else {
    simt::sync_block();
  }
  return {base, first, end < num_hits ? end : num_hits, before};
}

// Where very many scores are alike: the results not below the exact cut, in any order.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::gather_crowded(uint32_t found) {
  uint64_t cut = 0;
  if (found > result_limit_) {
    share_totals(1);
    simt::sync_group<kBlocks>();
    cut = pool_cut(1, result_limit_);
  }
  uint32_t* num_gathered = &simt::in_block<kBlocks>(&control(), 0)->num_gathered;
  const uint32_t count = num_entries(1);
#pragma unroll 1
  for (uint32_t from = simt::thread() & ~31u; from < count; from += kWarps * 32) {
    const uint32_t i = from + simt::lane();
    const uint64_t key = i < count ? results().keys[i] : 0;
    const bool wanted = i < count && key >= cut;
    const uint32_t votes = simt::ballot(wanted);
    if (votes == 0) continue;
    uint32_t at = 0;
    if (simt::lane() == 0) at = simt::atomic_add(num_gathered, simt::count_ones(votes));
    at = simt::shuffle(at, 0) + simt::count_ones(votes & simt::lanes_below());
    if (wanted) put_hit(0, at, key, i);
  }
}

// Orders gathered hits by a bitonic sort.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::sort_crowded(uint32_t count) {
  const uint64_t* keys = candidates().keys;
  uint32_t size = 2;
#pragma unroll 1
  while (size < count) size *= 2;
#pragma unroll 1
  for (uint32_t i = simt::thread(); i < size; i += kWarps * 32) sorted()[i] = static_cast<uint16_t>(i);
  simt::sync_block();
  auto key_at = [&](uint32_t place) { return place < count ? keys[place] : 0; };
#pragma unroll 1
  for (uint32_t run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (uint32_t by = run / 2; by > 0; by /= 2) {
#pragma unroll 1
      for (uint32_t i = simt::thread(); i < size / 2; i += kWarps * 32) {
        const uint32_t left = 2 * i - (i & (by - 1)), right = left + by;
        const uint16_t a = sorted()[left], b = sorted()[right];
        const bool descending = (left & run) == 0;
        if ((key_at(a) < key_at(b)) == descending) {
          sorted()[left] = b;
          sorted()[right] = a;
        }
      }
      simt::sync_block();
    }
  }
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::write_hits(const OwnHits& own, uint32_t num_hits) {
  const uint32_t me = simt::thread(), lane = simt::lane(), num_warps = simt::num_threads() >> 5;
  const uint64_t first_hit = static_cast<uint64_t>(query_) * batch_.result_capacity;
  uint32_t* tokens = batch_.hit_tokens + first_hit * batch_.max_depth;
  uint32_t written = own.tokens_before;
#pragma unroll 1
  for (uint32_t from = own.first; from < own.end; from += kWarps * 32) {
    const bool here = from + me < own.end;
    const uint32_t place = here ? sorted()[from + me - own.base] : 0;
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
    if (from + kWarps * 32 < own.end) simt::sync_block();  // the sums have been read
  }
  if (me == 0 && own.first < own.end && own.end == num_hits) batch_.num_tokens[query_] = written;
}

// Follows the parents back to the root, eight steps at a time so that the reads of the tokens overlap.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::write_tokens(uint32_t link, uint32_t depth, uint32_t* to) const {
  constexpr uint32_t kAtOnce = 8;
  if (batch_.token_bytes != 4) return write_other_tokens_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), link, depth, to);
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
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::write_other_tokens(uint32_t link, uint32_t depth, uint32_t* to) const {
#pragma unroll 1
  for (;;) {
    --depth;
    to[depth] = load_token(grid_ + static_cast<uint64_t>(depth) * batch_.num_slots + (link & (kMaxSlots - 1)));
    if (depth == 0) return;
    link = parent_link(link, depth - 1);
  }
}

// Where a beam's parent came from; `row` says at which step.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::parent_link(uint32_t link, uint32_t row) const {
  const uint32_t block = link >> kLinkBlockShift & (kBlocks - 1);
  return simt::in_block<kBlocks>(history(row), block)[link >> kLinkBeamShift];
}

}  // namespace flashtrie
