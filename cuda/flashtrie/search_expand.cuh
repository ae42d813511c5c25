// Part of search_group.cuh: from a frontier and a row of proposals to candidates and results.
#pragma once

namespace flashtrie {

constexpr uint32_t kFloorEvery = 512;  // new entries of a pool after which its floor is raised

// One round of a warp: it scans its windows and judges what matches, until it is through or a pool is full. What remains is
// for the next round, with the same cursor.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::expand(Cursor& cursor) {
  const uint32_t num_warps = (simt::num_threads() >> 5) - kRowWarps;
  uint64_t* queue = queues() + (simt::thread() >> 5) * kQueuePlaces;
#pragma unroll 1
  for (;;) {
    const uint32_t votes = simt::ballot(cursor.mask != 0);
    const bool more = cursor.window * 32 < num_label_groups_;
    if (cursor.queued >= 32 || (votes == 0 && !more && !cursor.is_loaded)) {
      if (cursor.queued == 0) return;
      if (simt::any(is_full())) return call_again();
      const uint32_t taken = cursor.queued < 32 ? cursor.queued : 32;
      cursor.queued -= taken;
      const bool here = simt::lane() < taken;
      const uint64_t match = here ? queue[cursor.queued + simt::lane()] : 0;
      simt::sync_warp();
      judge(here, static_cast<uint32_t>(match), static_cast<uint32_t>(match >> 32));
    } else if (votes != 0) {
      if (cursor.mask != 0) {
        const uint32_t node = cursor.node + simt::lowest_one(cursor.mask);
        cursor.mask &= cursor.mask - 1;
        queue[cursor.queued + simt::count_ones(votes & simt::lanes_below())] =
            static_cast<uint64_t>(cursor.beam) << 32 | node;
      }
      cursor.queued += simt::count_ones(votes);
      simt::sync_warp();
    } else {
      // The next window is under way while this one's matches are judged.
      if (cursor.is_loaded) test_window(cursor);
      cursor.is_loaded = more;
      if (more) cursor.loaded = load_window(cursor.window);
      cursor.window += kBlocks * num_warps;
    }
  }
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::call_again() {
  if (simt::lane() != 0) return;
  for (int b = 0; b < kBlocks; ++b) simt::in_block<kBlocks>(&control(), b)->again[round_ & 1] = 1;
}

// Whether a pool could overflow if every warp of the block added 32 entries now.
template <int kBlocks, bool kSpill>
FT_DEVICE bool GroupSearch<kBlocks, kSpill>::is_full() const {
  return *candidates().count + kPoolSlack > candidates().capacity || *results().count + kPoolSlack > results().capacity;
}

// Begins to load a window, one label group a lane.
template <int kBlocks, bool kSpill>
FT_DEVICE typename GroupSearch<kBlocks, kSpill>::Window GroupSearch<kBlocks, kSpill>::load_window(uint32_t at) const {
  const uint32_t from = at * 32, group = from + simt::lane();
  uint32_t beam = find_beam(from);
  // Every beam has a group, so at most 32 beams share a window: one bit for each that starts in it.
  const uint32_t next = beam + 1 + simt::lane();
  const uint32_t offset = next < num_beams_ ? beam_start()[next] - from : 32;
  const uint32_t starts = simt::reduce_or(offset < 32 ? 1u << offset : 0);
  beam += simt::count_ones(starts & (simt::lanes_below() << 1 | 1));
  Window window{};
  window.beam = beam;
  if (group >= num_label_groups_) return window;
  const ChildRange range = {beam_first()[beam], beam_last()[beam]};
  const uint32_t place = group - beam_start()[beam];
  if ((step_ == 0 && batch_.root_table) || is_wide(range)) {
    window.node = find_wide(range, place);
    window.wanted = window.node != kNoNode ? kFound : 0;
    return window;
  }
  const uint32_t base = ((range.first >> 3) + place) << 3;
  window.node = base;
  window.labels = simt::load_quad(batch_.trie.label_low + base);
  // The eight share a line, which whoever judges a match of them reads next.
  simt::touch(&batch_.trie.lines[base >> 6]);
  if (batch_.trie.high_width > 0) simt::touch(&batch_.trie.high_flags[base >> 6]);
  const uint32_t begin = range.first > base ? range.first - base : 0;
  const uint32_t end = range.last - base < 8 ? range.last - base : 8;
  window.wanted = (1u << end) - (1u << begin);
  return window;
}

// Which of a group's labels share their low half with a proposal.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::test_window(Cursor& cursor) const {
  const Window& window = cursor.loaded;
  cursor.beam = window.beam;
  cursor.node = window.node;
  cursor.mask = window.wanted == kFound;
  if (!simt::any(window.wanted != 0 && window.wanted != kFound)) return;
  const uint32_t* bitmap = table(step_).bitmap;
  const uint32_t pairs[4] = {window.labels.x, window.labels.y, window.labels.z, window.labels.w};
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    mask |= static_cast<uint32_t>(bitmap_test(bitmap, pairs[i] & 0xffff)) << (2 * i);
    mask |= static_cast<uint32_t>(bitmap_test(bitmap, pairs[i] >> 16)) << (2 * i + 1);
  }
  if (window.wanted != kFound) cursor.mask = mask & window.wanted;
}

// The last beam that starts at or before a label group, by a search of the whole warp.
template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::find_beam(uint32_t group) const {
  uint32_t beam = 0, span = num_beams_;
#pragma unroll 1
  while (span > 1) {
    const uint32_t stride = (span + 31) >> 5;
    const uint32_t probe = beam + simt::lane() * stride;
    const bool before = simt::lane() * stride < span && beam_start()[probe] <= group;
    beam += (simt::count_ones(simt::ballot(before)) - 1) * stride;
    const uint32_t left = num_beams_ - beam;
    span = stride < left ? stride : left;
  }
  return beam;
}

FT_OUTLINE uint32_t find_child_outlined(const TrieView& trie, ChildRange range, uint32_t token) {
  return find_child(trie, range, token);
}

// The child of a node with a very large fan-out that a slot's token leads to, or kNoNode.
template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::find_wide(ChildRange range, uint32_t slot) const {
  const uint32_t token = load_token(grid_ + static_cast<uint64_t>(step_) * batch_.num_slots + slot);
  if (token == kNoToken) return kNoNode;
  const uint64_t best = table(step_).find(token);
  if (best == 0 || StepTable::slot_of(best) != slot) return kNoNode;  // empty, or an earlier slot has the token
  if (step_ != 0 || !batch_.root_table) return find_child_outlined(batch_.trie, range, token);
  const uint32_t at = token >> batch_.root_shift;
  if (at >= batch_.root_places) return kNoNode;
  uint32_t low = simt::load_word(batch_.root_table + at), high = simt::load_word(batch_.root_table + at + 1);
  if (batch_.root_shift == 0) return low < high ? low : kNoNode;
  // The labels between agree above the shift, so their low halves tell.
  const uint32_t last = high;
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = low + ((high - low) >> 1);
    if (simt::load_word(batch_.trie.label_low + middle) < (token & 0xffff))
      low = middle + 1;
    else
      high = middle;
  }
  return low < last && simt::load_word(batch_.trie.label_low + low) == (token & 0xffff) ? low : kNoNode;
}

// Judges a match a lane, and puts what is a candidate or a result into the pools. Two reads deep behind the scan: the
// node's line and label, touched by the scan; then the high part and the louds words, side by side.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::judge(bool here, uint32_t node, uint32_t beam) {
  const TrieView& trie = batch_.trie;
  const unsigned char* line = reinterpret_cast<const unsigned char*>(&trie.lines[node >> 6]);
  const simt::Quad bits = simt::load_quad(line);
  const simt::Quad ranks = simt::load_quad(line + 16);  // terminal_rank, first_child, wide, high_rank
  const uint32_t low = simt::load_word(trie.label_low + node);
  const uint64_t flags = trie.high_width > 0 ? simt::load_word(trie.high_flags + (node >> 6)) : 0;

  const uint32_t bit = node & 63;
  const bool is_high = (flags >> bit) & 1;
  const bool terminal = ((bits.x | static_cast<uint64_t>(bits.y) << 32) >> bit) & 1;
  const bool leaf = ((bits.z | static_cast<uint64_t>(bits.w) << 32) >> bit) & 1;
  const bool grows = here && !leaf && !is_last_;
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
  const uint64_t best = here ? row.find(token) : 0;
  float score = 0;
  if (best != 0) score = beam_scores()[beam] + StepTable::logprob_of(best);
  const bool passes = best != 0 && score > batch_.search.sequence_threshold;
  const uint32_t link = beam << 16 | StepTable::slot_of(best);

  const float total = batch_.search.eos == kNoToken ? score : score + end_logprob_;
  const uint64_t result_key = rank_key(total * factor_, node);
  const bool answers = passes && terminal && can_end_ && result_key >= result_floor_ &&
                       score_bin(result_key) >= control().result_floor;
  const uint32_t num_results =
      push(results(), result_histogram(), answers, result_key, link, float_bits(total), step_ + 1);
  if (num_results >= kFloorEvery && num_results > result_limit_)
    raise_floor(result_histogram(), result_limit_, &control().result_floor);

  const uint64_t key = rank_key(score, node);
  const bool competes = passes && grows && key >= candidate_floor_ &&
                        score_bin(key) >= control().candidate_floor[step_ & 1];
  ChildRange range{0, 0};
  if (competes) {
    range = window.resolve(trie, node, ranks.y, ranks.z);
    // What the next step scans, should this one survive.
    simt::prefetch(trie.label_low + range.first);
    simt::prefetch(&trie.lines[range.first >> 6]);
    if (trie.high_width > 0) simt::prefetch(&trie.high_flags[range.first >> 6]);
  }
  const uint32_t num_candidates =
      push(candidates(), candidate_histogram(step_), competes, key, link, range.first, range.last);
  if (num_candidates >= kFloorEvery && num_candidates > beam_width_)
    raise_floor(candidate_histogram(step_), beam_width_, &control().candidate_floor[step_ & 1]);
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::raise_floor(const uint32_t* histogram, uint32_t n, uint32_t* floor) const {
  const uint32_t bin = floor_bin(histogram, n);
  if (simt::lane() == 0) simt::atomic_max(floor, bin);
}

// Adds one entry a lane, where wanted; there is room. Whole warps. The number of entries when this warp's additions carry
// it over a multiple of kFloorEvery, else 0.
template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::push(const Pool& pool, uint32_t* histogram, bool wanted, uint64_t key,
                                                      uint32_t link, uint32_t first, uint32_t second) {
  const uint32_t votes = simt::ballot(wanted);
  if (votes == 0) return 0;
  const uint32_t added = simt::count_ones(votes);
  uint32_t before = 0;
  if (simt::lane() == 0) before = simt::atomic_add(pool.count, added);
  before = simt::shuffle(before, 0);
  if (wanted) {
    const uint32_t at = before + simt::count_ones(votes & simt::lanes_below());
    pool.keys[at] = key;
    pool.links()[at] = link;
    pool.first()[at] = first;
    pool.second()[at] = second;
    count_in_bin(histogram, key);
  }
  return before / kFloorEvery != (before + added) / kFloorEvery ? before + added : 0;
}

}  // namespace flashtrie
