// Part of search_group.cuh: from a frontier and a row of proposals to candidates and results.
#pragma once

namespace flashtrie {

// Scans this warp's windows and judges what matches. Comes back early when a budget ran out; called again with the same
// cursor after pruning, it goes on where it stopped.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::expand(Cursor& cursor) {
  const uint32_t stride = kBlocks * (simt::num_threads() >> 5);
  for (;;) {
    const uint32_t votes = simt::ballot(cursor.mask != 0);
    const bool scans = cursor.window * 32 < num_label_groups_;
    if (cursor.queued >= 32 || (votes == 0 && !scans)) {
      if (cursor.queued == 0 || !judge(cursor)) return;
    } else if (votes == 0) {
      scan(cursor);
      cursor.window += stride;
    } else {
      if (cursor.mask != 0) {
        const uint32_t node = cursor.node + simt::lowest_one(cursor.mask);
        cursor.mask &= cursor.mask - 1;
        queue_[cursor.queued + simt::count_ones(votes & simt::lanes_below())] =
            static_cast<uint64_t>(cursor.beam) << 32 | node;
      }
      cursor.queued += simt::count_ones(votes);
      simt::sync_warp();
    }
  }
}

// One label group a lane: which of its eight labels share their low half with a proposal.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::scan(Cursor& cursor) {
  const uint32_t lane = simt::lane();
  const uint32_t from = cursor.window * 32;
  uint32_t beam = find_beam(from);
  // Every beam has a group, so at most 32 beams share a window: one bit for each that starts in it.
  const uint32_t next = beam + 1 + lane;
  const uint32_t offset = next < num_beams_ ? beam_start_[next] - from : 32;
  const uint32_t starts = simt::reduce_or(offset < 32 ? 1u << offset : 0);
  beam += simt::count_ones(starts & (simt::lanes_below() << 1 | 1));
  const uint32_t group = from + lane;
  cursor.mask = 0;
  cursor.beam = beam;
  if (group >= num_label_groups_) return;
  const ChildRange range = {beam_first_[beam], beam_last_[beam]};
  const uint32_t place = group - beam_start_[beam];
  const StepTable row = table(step_);
  if ((step_ == 0 && batch_.root_table) || is_wide(range)) {
    cursor.node = find_wide(range, place);
    cursor.mask = cursor.node != kNoNode;
    return;
  }
  const uint32_t base = ((range.first >> 3) + place) << 3;
  const simt::Quad labels = simt::load_quad(batch_.trie.label_low + base);
  const uint32_t begin = range.first > base ? range.first - base : 0;
  const uint32_t end = range.last - base < 8 ? range.last - base : 8;
  const uint32_t pairs[4] = {labels.x, labels.y, labels.z, labels.w};
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    mask |= static_cast<uint32_t>(bitmap_test(row.bitmap, pairs[i] & 0xffff)) << (2 * i);
    mask |= static_cast<uint32_t>(bitmap_test(row.bitmap, pairs[i] >> 16)) << (2 * i + 1);
  }
  cursor.mask = mask & ((1u << end) - (1u << begin));
  cursor.node = base;
}

// The last beam that starts at or before a label group, by a search of the whole warp.
template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::find_beam(uint32_t group) const {
  uint32_t beam = 0, span = num_beams_;
  while (span > 1) {
    const uint32_t stride = (span + 31) >> 5;
    const uint32_t probe = beam + simt::lane() * stride;
    const bool before = simt::lane() * stride < span && beam_start_[probe] <= group;
    beam += (simt::count_ones(simt::ballot(before)) - 1) * stride;
    const uint32_t left = num_beams_ - beam;
    span = stride < left ? stride : left;
  }
  return beam;
}

// The child of a node with a very large fan-out that a slot's token leads to, or kNoNode.
template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::find_wide(ChildRange range, uint32_t slot) const {
  const uint32_t token = load_token(grid_ + static_cast<uint64_t>(step_) * batch_.num_slots + slot);
  const uint64_t best = table(step_).find(token);
  if (best == 0 || StepTable::slot_of(best) != slot) return kNoNode;  // empty, or an earlier slot has the token
  if (step_ != 0 || !batch_.root_table) return find_child(batch_.trie, range, token);
  const uint32_t at = token >> batch_.root_shift;
  if (at >= batch_.root_places) return kNoNode;
  uint32_t low = simt::load_word(batch_.root_table + at), high = simt::load_word(batch_.root_table + at + 1);
  // The labels between agree above the shift, so their low halves tell.
  const uint32_t last = high;
  while (low < high) {
    const uint32_t middle = low + ((high - low) >> 1);
    if (simt::load_word(batch_.trie.label_low + middle) < (token & 0xffff))
      low = middle + 1;
    else
      high = middle;
  }
  return low < last && simt::load_word(batch_.trie.label_low + low) == (token & 0xffff) ? low : kNoNode;
}

// Takes up to 32 matches from the queue, one a lane, and puts what is a candidate or a result into the pools. False,
// and nothing taken, when the budget is used up. Three reads deep: the node's line and label; then the high
// part and the louds words, side by side.
template <int kBlocks, bool kSpill>
FT_DEVICE bool GroupSearch<kBlocks, kSpill>::judge(Cursor& cursor) {
  const TrieView& trie = batch_.trie;
  const uint32_t lane = simt::lane();
  const uint32_t taken = cursor.queued < 32 ? cursor.queued : 32;
  const uint64_t entry = lane < taken ? queue_[cursor.queued - taken + lane] : 0;
  const uint32_t node = static_cast<uint32_t>(entry), beam = static_cast<uint32_t>(entry >> 32);
  const unsigned char* line = reinterpret_cast<const unsigned char*>(&trie.lines[node >> 6]);
  const simt::Quad bits = simt::load_quad(line);
  const simt::Quad ranks = simt::load_quad(line + 16);  // terminal_rank, first_child, wide, high_rank
  const uint32_t low = simt::load_word(trie.label_low + node);
  const uint64_t flags = trie.high_width > 0 ? simt::load_word(trie.high_flags + (node >> 6)) : 0;

  // Only where the pools could overflow in this round at all: every match costs one of the budget.
  if (num_label_groups_ > budget_ >> 3) {
    uint32_t before = 0;
    if (lane == 0) before = simt::atomic_add(&control_->matches[round_ & 1], taken);
    if (simt::shuffle(before, 0) + taken > budget_) {
      if (lane == 0)
        for (int b = 0; b < kBlocks; ++b) simt::in_block<kBlocks>(control_, b)->full[round_ & 1] = 1;
      return false;
    }
  }
  cursor.queued -= taken;
  simt::sync_warp();

  const uint32_t bit = node & 63;
  const bool is_high = (flags >> bit) & 1;
  const bool terminal = ((bits.x | static_cast<uint64_t>(bits.y) << 32) >> bit) & 1;
  const bool leaf = ((bits.z | static_cast<uint64_t>(bits.w) << 32) >> bit) & 1;
  const bool grows = lane < taken && !leaf && !is_last_;
  uint64_t high_words[2] = {0, 0};
  uint64_t high_bit = 0;
  if (is_high) {
    const uint64_t rank = ranks.w + popcount64(flags & ((uint64_t(1) << bit) - 1));
    high_bit = rank * trie.high_width;
    high_words[0] = simt::load_word(trie.high_bits + (high_bit >> 6));
    high_words[1] = simt::load_word(trie.high_bits + (high_bit >> 6) + 1);
  }
  LoudsWindow window;
  if (grows) window.ask(trie, node, ranks.y, ranks.z);

  uint32_t token = low;
  if (is_high) {
    const int shift = static_cast<int>(high_bit & 63);
    uint64_t high = high_words[0] >> shift;
    if (shift > 0) high |= high_words[1] << (64 - shift);
    token |= static_cast<uint32_t>(high & ((uint64_t(1) << trie.high_width) - 1)) << 16;
  }
  const StepTable row = table(step_);
  const uint64_t best = lane < taken ? row.find(token) : 0;
  float score = 0;
  if (best != 0) score = beam_scores_[beam] + StepTable::logprob_of(best);
  const bool passes = best != 0 && score > batch_.search.sequence_threshold;
  const uint32_t link = beam << 16 | StepTable::slot_of(best);

  const float total = batch_.search.eos == kNoToken ? score : score + end_logprob_;
  const uint64_t result_key = rank_key(total * factor_, node);
  push(results_, result_histogram(), passes && terminal && can_end_ && result_key >= result_floor_, result_key, link,
       float_bits(total), step_ + 1);
  const uint64_t key = rank_key(score, node);
  const bool competes = passes && grows && key >= candidate_floor_;
  ChildRange range{0, 0};
  if (competes) range = window.resolve(trie, node, ranks.y, ranks.z);
  push(candidates_, candidate_histogram(step_), competes, key, link, range.first, range.last);
  return true;
}

// Adds one entry a lane, where wanted. Whole warps; there is room.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::push(Pool& pool, uint32_t* histogram, bool wanted, uint64_t key,
                                                  uint32_t link, uint32_t first, uint32_t second) {
  const uint32_t votes = simt::ballot(wanted);
  if (votes == 0) return;
  uint32_t at = 0;
  if (simt::lane() == 0) at = simt::atomic_add(pool.count, simt::count_ones(votes));
  at = simt::shuffle(at, 0) + simt::count_ones(votes & simt::lanes_below());
  if (!wanted) return;
  pool.keys[at] = key;
  pool.links[at] = link;
  pool.first[at] = first;
  pool.second[at] = second;
  count_in_bin(histogram, key);
}

}  // namespace flashtrie
