// Part of search_group.cuh: from a frontier and a row of proposals to candidates and results.
#pragma once

namespace flashtrie {

constexpr uint32_t kFloorEvery = 256;  // new entries of a block's pool after which its floor is raised, if so many are too many

// One round of a warp: it scans its windows and judges what matches, until it is through or a pool is full. What remains is
// for the next round, with the same cursor.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::expand(Cursor& cursor) {
  uint64_t* queue = queues() + (simt::thread() >> 5) * kQueuePlaces;
  const uint32_t num_windows = (num_label_groups_ + 31) >> 5;
#pragma unroll 1
  for (;;) {
    // Up to two matches a lane and turn; most have none or one.
    uint32_t votes = simt::ballot(cursor.mask != 0);
#pragma unroll 1
    while (votes != 0 && cursor.queued < 32) {
      const uint32_t rest = cursor.mask & (cursor.mask - 1);
      const uint32_t second = simt::ballot(rest != 0);
      const uint32_t at = cursor.queued + simt::count_ones(votes & simt::lanes_below());
      const uint32_t at_second = cursor.queued + simt::count_ones(votes) + simt::count_ones(second & simt::lanes_below());
      const uint64_t beam = static_cast<uint64_t>(cursor.beam) << 32;
      if (cursor.mask != 0) queue[at] = beam | (cursor.node + simt::lowest_one(cursor.mask));
      if (rest != 0) queue[at_second] = beam | (cursor.node + simt::lowest_one(rest));
      cursor.mask = rest & (rest - 1);
      cursor.queued += simt::count_ones(votes) + simt::count_ones(second);
      votes = simt::ballot(cursor.mask != 0);
    }
    const bool more = cursor.window < num_windows;
    if (cursor.queued >= 32 || (!more && !cursor.is_loaded)) {
      if (cursor.queued == 0) {
        if (kMode == kPairs && has_rest()) call_again(kMoreRounds);
        return;
      }
      if (simt::any(is_full())) {
        if (kMode == kPairs && simt::lane() == 0) control().unfinished[round_ & 1] = 1;
        return call_again(kPoolFull);
      }
      simt::sync_warp();
      const uint32_t taken = cursor.queued < 32 ? cursor.queued : 32;
      cursor.queued -= taken;
      const bool here = simt::lane() < taken;
      const uint64_t match = here ? queue[cursor.queued + simt::lane()] : 1;
      simt::sync_warp();
      judge(here, static_cast<uint32_t>(match), static_cast<uint32_t>(match >> 32));
    } else {
      // The next window is under way while this one's matches are judged.
      if (cursor.is_loaded) test_window(cursor);
      cursor.is_loaded = more;
      if (more) cursor.loaded = load_window(cursor.window);
      cursor.window += window_stride();
    }
  }
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::call_again(uint32_t why) {
  if (simt::lane() != 0) return;
  for (int b = 0; b < kBlocks; ++b) {
    uint32_t* again = &simt::in_block<kBlocks>(&control(), b)->again[round_ & 1];
    if (kMode == kPairs)
      simt::atomic_or(again, why);
    else
      *again = why;
  }
}

// Whether a pool could overflow if every warp of the block added 32 entries now.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::is_full() const {
  constexpr uint32_t kSlack = kExpandWarps * 32;
  return num_entries(0) + kSlack > batch_.candidate_places || num_entries(1) + kSlack > batch_.result_places;
}

// Begins to load a window, one label group a lane.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE typename GroupSearch<kBlocks, kWarps, kMode>::Window GroupSearch<kBlocks, kWarps, kMode>::load_window(
    uint32_t at) const {
  const uint32_t from = at * 32, group = from + simt::lane();
  uint32_t beam = at < kWindowPlaces ? windows()[at] : find_beam_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), from);
  // Every beam has a group, so at most 32 beams share a window: one bit for each that starts in it.
  const uint32_t offset = beam_starts(step_)[beam + 1 + simt::lane()] - from;
  const uint32_t starts = simt::reduce_or(offset < 32 ? 1u << offset : 0);
  beam += simt::count_ones(starts & (simt::lanes_below() << 1 | 1));
  Window window{};
  window.beam = beam;
  if (group >= num_label_groups_) return window;
  const Beam from_beam = beams()[beam];
  const ChildRange range = {from_beam.first, from_beam.last};
  const uint32_t place = (group - from_beam.start) & ~kAsks;
  if (step_ == 0 && batch_.root_table) {
    window.node = find_root_child(place);
    window.wanted = window.node != kNoNode ? kFound : 0;
    return window;
  }
  if (kMode == kPairs && (from_beam.start & kAsks)) return ask(window, from_beam, place);
  if (from_beam.start & kAsks) {
    window.node = look_for_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), beam, place);
    window.wanted = window.node != kNoNode ? kFound : 0;
    return window;
  }
  // By now floors may have risen above all that this beam can still give.
  if (at >= window_stride() && !can_contribute(from_beam.score)) return window;
  const uint32_t base = ((range.first >> 3) + place) << 3;
  window.node = base;
  window.labels = simt::load_quad(simt::at(batch_.trie.label_low, base));
  // Of the eight, whoever judges a match reads these next.
  simt::touch(simt::at(batch_.tags, base), touched());
  simt::touch(simt::at(batch_.heads, base >> 6), touched());
  const uint32_t begin = range.first > base ? range.first - base : 0;
  const uint32_t end = range.last - base < 8 ? range.last - base : 8;
  window.wanted = (1u << end) - (1u << begin);
  return window;
}

// Whether the best proposal of the row could lead a beam of this score past the floors. Float addition and the length factor
// are monotone, so what the best cannot reach nothing can; node 0 would win every tie.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::can_contribute(float beam_score) const {
  const uint64_t candidate_floor = control().floors[0];
  if (candidate_floor == 0 && !is_last_) return true;
  return can_reach(beam_score + score_of(control().best_logprobs[step_ & 1]));
}

// Whether an entry of this score could pass the floors.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::can_reach(float score) const {
  if (!is_last_ && rank_key(score, 0) >= control().floors[0]) return true;
  const float total = batch_.search.eos == kNoToken ? score : score + end_logprob_;
  return can_end_ && rank_key(total * factor_, 0) >= control().floors[1];
}

// Asks for the child that a slot leads to, unless it cannot pass the bar or the floors: which bucket of the table it would be
// in. Whether it is there, `answer` sees when the bucket has come, and whether it is the right one, `judge`.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE typename GroupSearch<kBlocks, kWarps, kMode>::Window GroupSearch<kBlocks, kWarps, kMode>::ask(
    Window window, const Beam& beam, uint32_t slot) const {
  if (slot >= batch_.num_slots || beam.first == beam.last) return window;
  const uint32_t token = table(step_).tokens[slot];
  const float logprob = table(step_).logprobs[slot];
  if (token == kNoToken || is_below_bar(beam.score, logprob) || !can_reach(beam.score + logprob)) return window;
  window.node = child_bucket(batch_.children.num_buckets, beam.first, token);
  window.labels = {beam.first, beam.last, slot, 0};
  window.wanted = kAsked;
  simt::touch(batch_.children.places + static_cast<uint64_t>(window.node) * kBucketPlaces, touched());
  return window;
}

// The matches of a window that asks.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::answer(Cursor& cursor) const {
  const Window& window = cursor.loaded;
  if (window.wanted != kAsked) return;
  const ChildRange range = {window.labels.x, window.labels.y};
  BucketView view = look_into(batch_.children, window.node, range);
  if (view.is_full || view.num_siblings > 1)
    view.node = look_further_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), range.first, range.fan_out(), window.labels.z);
  else if (view.num_siblings == 0)
    view.node = kNoNode;
  cursor.mask = view.node != kNoNode;
  if (view.node == kNoNode) return;
  cursor.node = view.node;
  cursor.beam |= (window.labels.z + 1) << 16;
  simt::touch(simt::at(batch_.tags, view.node), touched());
  simt::touch(simt::at(batch_.heads, view.node >> 6), touched());
  simt::touch(simt::at(batch_.trie.label_low, view.node & ~1u), touched());
}

// The child that a slot leads to, wherever in the table it is, or kNoNode.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::look_further(uint32_t first_child, uint32_t fan_out, uint32_t slot) const {
  const ChildRange range = {first_child, first_child + fan_out};
  return find_in_table(batch_.children, batch_.trie, batch_.tags, range, table(step_).tokens[slot]);
}

// Which of a group's labels share their low half with a proposal.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::test_window(Cursor& cursor) const {
  const Window& window = cursor.loaded;
  cursor.beam = window.beam;
  cursor.node = window.node;
  cursor.mask = window.wanted == kFound;
  if (kMode == kPairs) answer(cursor);
  if (!simt::any(window.wanted != 0 && window.wanted < kFound)) return;
  const uint32_t* bitmap = table(step_).bitmap;
  const uint32_t pairs[4] = {window.labels.x, window.labels.y, window.labels.z, window.labels.w};
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    mask |= static_cast<uint32_t>(bitmap_test(bitmap, pairs[i] & 0xffff)) << (2 * i);
    mask |= static_cast<uint32_t>(bitmap_test(bitmap, pairs[i] >> 16)) << (2 * i + 1);
  }
  if (window.wanted < kFound) cursor.mask = mask & window.wanted;
}

// The last beam that starts at or before a label group, by a search of the whole warp.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::find_beam(uint32_t group) const {
  uint32_t beam = 0, span = num_beams_;
#pragma unroll 1
  while (span > 1) {
    const uint32_t stride = (span + 31) >> 5;
    const uint32_t probe = beam + simt::lane() * stride;
    const bool before = simt::lane() * stride < span && beam_starts(step_)[probe] <= group;
    beam += (simt::count_ones(simt::ballot(before)) - 1) * stride;
    const uint32_t left = num_beams_ - beam;
    span = stride < left ? stride : left;
  }
  return beam;
}

// The token of a slot that stands for itself: not empty, and no earlier slot has the same with a better log-prob.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::own_token(uint32_t slot) const {
  const uint32_t token = load_token(grid_ + static_cast<uint64_t>(step_) * batch_.num_slots + slot);
  if (token == kNoToken) return kNoToken;
  const uint64_t best = table(step_).find(token);
  return best != 0 && StepTable::slot_of(best) == slot ? token : kNoToken;
}

// The child of a beam that a slot's token leads to, or kNoNode, also where it could not pass the floors any more.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::look_for(uint32_t from, uint32_t slot) const {
  const Beam& beam = beams()[from];
  const uint32_t token = load_token(grid_ + static_cast<uint64_t>(step_) * batch_.num_slots + slot);
  const uint64_t best = token == kNoToken ? 0 : table(step_).find(token);
  if (best == 0 || StepTable::slot_of(best) != slot) return kNoNode;  // an earlier slot has the same with a better log-prob
  if (!can_reach(beam.score + StepTable::logprob_of(best))) return kNoNode;
  return find_in_table(batch_.children, batch_.trie, batch_.tags, {beam.first, beam.last}, token);
}

// The same for the root, whose children have a table.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::find_root_child(uint32_t slot) const {
  const uint32_t token = own_token(slot), at = token >> batch_.root_shift;
  if (token == kNoToken || at >= batch_.root_places) return kNoNode;
  uint32_t low = simt::load_word(batch_.root_table + at);
  const uint32_t last = simt::load_word(batch_.root_table + at + 1);
  if (batch_.root_shift == 0) return low < last ? low : kNoNode;
  // The labels between agree above the shift, so their low halves tell.
  uint32_t high = last;
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

// Judges a match a lane, and puts what is a candidate or a result into the pools. All that it asks of the trie it asks
// at once; the scan has touched most of it.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::judge(bool here, uint32_t node, uint32_t beam_and_slot) {
  const uint32_t beam = kMode == kPairs ? beam_and_slot & 0xffff : beam_and_slot, asked = beam_and_slot >> 16;
  const uint32_t* tags = simt::at(batch_.tags, node);
  const uint32_t tag = simt::load_word(tags), before = simt::load_word(tags - 1);
  const simt::Pair head = simt::load_pair(simt::at(batch_.heads, node >> 6));
  const uint32_t low = simt::load_word(simt::at(batch_.trie.label_low, node));
  const float beam_score = beams()[beam].score;

  const uint64_t best = table(step_).find(low | tag >> kTagHighShift << 16);
  const float score = beam_score + StepTable::logprob_of(best);
  // A child that was asked for by slot may be another's, or an earlier slot has the same token with a better log-prob.
  const bool is_right = kMode != kPairs || asked == 0 || StepTable::slot_of(best) == asked - 1;
  const bool passes = here && best != 0 && is_right && score > batch_.search.sequence_threshold;
  const uint32_t link = beam << kLinkBeamShift | simt::rank<kBlocks>() << kLinkBlockShift | StepTable::slot_of(best);
  const uint64_t candidate_floor = control().floors[0], result_floor = control().floors[1];

  const float total = batch_.search.eos == kNoToken ? score : score + end_logprob_;
  const uint64_t result_key = rank_key(total * factor_, node);
  const bool answers = passes && (tag & kTagTerminal) && can_end_ && result_key >= result_floor;

  ChildRange range = {head.x + (node & 63 ? before & kTagChildren : 0), head.x + (tag & kTagChildren)};
  if (head.y != kNotWide) {
    const uint32_t* row = batch_.trie.wide + static_cast<uint64_t>(head.y) * kWideStride + (node & 63);
    range = {simt::load_word(row), simt::load_word(row + 1)};
  }
  const uint64_t key = rank_key(score, node);
  const bool competes = passes && !is_last_ && range.first != range.last && key >= candidate_floor;

  const uint32_t answer_votes = simt::ballot(answers), candidate_votes = simt::ballot(competes);
  if ((answer_votes | candidate_votes) == 0) return;
  const uint32_t num_answers = simt::count_ones(answer_votes), num_competing = simt::count_ones(candidate_votes);
  uint32_t counts = 0;
  if (simt::lane() < 2)  // both at once
    counts = simt::atomic_add(simt::lane() == 0 ? num_candidates() : &control().num_results,
                              simt::lane() == 0 ? num_competing : num_answers);
  const uint32_t first_candidate = simt::shuffle(counts, 0), first_answer = simt::shuffle(counts, 1);
  if (competes) {
    // What the next step scans and judges, should this one survive.
    simt::prefetch(batch_.trie.label_low + range.first);
    simt::prefetch(&batch_.tags[range.first]);
    simt::prefetch(&batch_.heads[range.first >> 6]);
    const uint32_t at = first_candidate + simt::count_ones(candidate_votes & simt::lanes_below());
    candidates().keys[at] = key;
    candidates().ranges()[at] = range;
    candidates().links()[at] = link;
    count_in_bin(candidate_histogram(step_), key);
  }
  if (answers) {
    simt::prefetch(simt::at(batch_.trie.lines, node >> 6));  // says which key it is
    const uint32_t at = first_answer + simt::count_ones(answer_votes & simt::lanes_below());
    results().keys[at] = result_key;
    results().scores()[at] = {total, link};
    results().depths()[at] = static_cast<uint16_t>(step_ + 1);
    count_in_bin(result_histogram(), result_key);
  }
  const uint32_t candidates_after = first_candidate + num_competing, answers_after = first_answer + num_answers;
  if (((first_candidate ^ candidates_after) | (first_answer ^ answers_after)) < kFloorEvery) return;
  const uint32_t share = (beam_width_ + kBlocks - 1) / kBlocks, result_share = (result_limit_ + kBlocks - 1) / kBlocks;
  if ((first_candidate ^ candidates_after) >= kFloorEvery && candidates_after > share + kFloorEvery)
    raise_floor_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), 0, share);
  if ((first_answer ^ answers_after) >= kFloorEvery && answers_after > result_share + kFloorEvery)
    raise_floor_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), 1, result_share);
}

// Raises the floor under candidates (0) or results (1) by a warp of its own accord. Where every block of a cluster has its
// share of n entries at or above a bin, the group has n.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::raise_floor(int which, uint32_t share) {
  uint32_t bin = floor_bin(which == 0 ? candidate_histogram(step_) : result_histogram(), share);
  if (kBlocks > 1) {
    uint32_t* mine = &control().floor_bins[which][simt::rank<kBlocks>()];
    if (simt::lane() < kBlocks) simt::atomic_max(simt::in_block<kBlocks>(mine, simt::lane()), bin);
    simt::sync_warp();
    const uint32_t theirs = simt::lane() < kBlocks ? control().floor_bins[which][simt::lane()] : kBins;
    bin = ~simt::reduce_max(~theirs);
  }
  if (simt::lane() == 0) simt::atomic_max(&control().floors[which], bin_start(bin));
}

}  // namespace flashtrie
