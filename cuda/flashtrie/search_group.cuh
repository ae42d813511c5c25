// The beam search of one query by a group of blocks, and of many queries one after another.
//
// A step: every warp scans windows of 32 label groups (16 bytes, 8 labels each) against the step's bitmap and queues
// what matches; a thread judges one match at a time, its reads side by side with those of the others; what is
// still in the race goes into two pools, candidates for the next frontier and results, each counted by score bin. One
// barrier later the bins tell the cut, and the survivors become the next frontier. Order comes from the rank keys
// alone, never from threads.
#pragma once
#include "louds_window.cuh"
#include "search_batch.cuh"
#include "step_table.cuh"

namespace flashtrie {

enum SearchPhase { kPhaseBegin, kPhaseExpand, kPhaseRow, kPhaseWait, kPhaseCut, kPhaseSurvive, kPhaseFinish, kPhases };

template <int kBlocks, bool kSpill>
class GroupSearch {
 public:
  FT_DEVICE GroupSearch(const SearchBatch& batch, unsigned char* shared);
  FT_DEVICE void run();

 private:
  // What a warp has under way while it expands the frontier; kept when a budget runs out in between.
  struct Cursor {
    uint32_t window;  // the next one to scan
    uint32_t mask;    // matches of this lane's group not yet queued
    uint32_t node;    // the group's first node
    uint32_t beam;
    uint32_t queued;
  };

  FT_DEVICE void search(uint32_t query);
  FT_DEVICE void begin(uint32_t query);
  FT_DEVICE void step();
  FT_DEVICE void reset_round();
  FT_DEVICE void set_budget(uint32_t num_candidates);
  FT_DEVICE void put_row(uint32_t row, uint32_t token, float logprob);
  FT_DEVICE void check_rows(uint32_t from);
  FT_DEVICE void prune();
  FT_DEVICE void survive(uint64_t cut);
  FT_DEVICE void compact(Pool& pool, uint32_t* histogram, uint64_t cut);
  FT_DEVICE uint64_t settle(const Pool& pool, const BinCut& cut, uint32_t n, int which);
  FT_DEVICE uint64_t search_cut(const Pool& pool, uint32_t n);
  FT_DEVICE uint32_t group_sum(uint32_t value);
  FT_DEVICE uint32_t group_count(const uint32_t* count) const;

  // search_expand.cuh
  FT_DEVICE void expand(Cursor& cursor);
  FT_DEVICE void scan(Cursor& cursor);
  FT_DEVICE uint32_t find_beam(uint32_t group) const;
  FT_DEVICE uint32_t find_wide(ChildRange range, uint32_t slot) const;
  FT_DEVICE bool judge(Cursor& cursor);
  FT_DEVICE void push(Pool& pool, uint32_t* histogram, bool wanted, uint64_t key, uint32_t link, uint32_t first,
                      uint32_t second);

  // search_finish.cuh
  FT_DEVICE void finish();
  FT_DEVICE void gather(uint64_t cut);
  FT_DEVICE void sort(uint32_t num_hits);
  FT_DEVICE void sort_crowded(uint32_t num_hits);
  FT_DEVICE void write_hits(uint32_t num_hits);
  FT_DEVICE void write_tokens(uint32_t link, uint32_t depth, uint32_t* to) const;

  FT_DEVICE uint32_t load_token(uint64_t at) const;
  FT_DEVICE float load_logprob(uint64_t at) const;
  FT_DEVICE StepTable table(uint32_t step) const;
  FT_DEVICE uint32_t* candidate_histogram(uint32_t step) const { return histograms_ + (step & 1) * kBinWords; }
  FT_DEVICE uint32_t* result_histogram() const { return histograms_ + 2 * kBinWords; }
  FT_DEVICE uint32_t* combined(int which) const { return histograms_ + (3 + which) * kBinWords; }
  FT_DEVICE bool is_wide(ChildRange range) const { return range.fan_out() > batch_.scan_limit; }
  FT_DEVICE uint32_t num_groups(ChildRange range) const {
    return is_wide(range) ? batch_.num_slots : ((range.last - 1) >> 3) - (range.first >> 3) + 1;
  }
  FT_DEVICE SearchControl& leader() const { return *simt::in_block<kBlocks>(control_, 0); }
  FT_DEVICE void lap(SearchPhase phase);

  const SearchBatch& batch_;
  SearchControl* control_;
  uint32_t* bitmaps_;
  uint32_t* histograms_;
  uint64_t* ties_;
  unsigned char* tables_;
  uint64_t* queue_;  // this warp's
  float* beam_scores_;
  uint32_t* beam_first_;
  uint32_t* beam_last_;
  uint32_t* beam_start_;  // first label group of a beam among those of the frontier
  Pool candidates_, results_;
  uint32_t* history_;  // the leader's; row s is the frontier of step s + 1: parent << 16 | slot

  // Of this query.
  uint64_t grid_;  // its first slot
  uint32_t query_, num_steps_, beam_width_, result_limit_;
  uint64_t result_floor_;
  // Of this step.
  uint32_t step_, round_, num_beams_, num_label_groups_;
  uint32_t budget_;
  uint64_t candidate_floor_;
  bool is_last_, can_end_;
  float end_logprob_, factor_;
  int64_t lap_start_;
};

template <int kBlocks, bool kSpill>
FT_DEVICE GroupSearch<kBlocks, kSpill>::GroupSearch(const SearchBatch& batch, unsigned char* shared) : batch_(batch) {
  const SearchSizes sizes(batch, simt::num_threads(), kBlocks);
  control_ = reinterpret_cast<SearchControl*>(shared);
  shared += sizes.control;
  bitmaps_ = reinterpret_cast<uint32_t*>(shared);
  shared += sizes.bitmaps;
  histograms_ = reinterpret_cast<uint32_t*>(shared);
  shared += sizes.histograms;
  ties_ = reinterpret_cast<uint64_t*>(shared);
  shared += sizes.ties;
  tables_ = shared;
  shared += sizes.tables;
  queue_ = reinterpret_cast<uint64_t*>(shared) + (simt::thread() >> 5) * kQueuePlaces;
  shared += sizes.queues;
  unsigned char* large = shared;
  if (kSpill) large = batch.workspace + simt::block() / kBlocks * batch.workspace_bytes;
  const uint32_t beams = batch.beam_capacity;
  beam_scores_ = reinterpret_cast<float*>(large);
  beam_first_ = reinterpret_cast<uint32_t*>(large) + beams;
  beam_last_ = beam_first_ + beams;
  beam_start_ = beam_last_ + beams;
  large += sizes.frontier;
  auto place = [&](Pool& pool, uint32_t places, uint32_t* count) {
    pool.keys = reinterpret_cast<uint64_t*>(large);
    pool.links = reinterpret_cast<uint32_t*>(large + 8ull * places);
    pool.first = pool.links + places;
    pool.second = pool.first + places;
    pool.count = count;
    pool.capacity = places;
    large += 20ull * places;
  };
  place(candidates_, batch.candidate_places, &control_->num_candidates[0]);
  place(results_, batch.result_places, &control_->num_results);
  const uint32_t rows = batch.max_depth > 0 ? batch.max_depth - 1 : 0;
  if (batch.history)
    history_ = batch.history + static_cast<uint64_t>(simt::block() / kBlocks) * rows * beams;
  else
    history_ = simt::in_block<kBlocks>(reinterpret_cast<uint32_t*>(large), 0);
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::run() {
  const uint32_t num_groups = simt::num_blocks() / kBlocks;
  const bool persistent = batch_.num_queries > num_groups;
  const bool leads = simt::rank<kBlocks>() == 0 && simt::thread() == 0;
  uint32_t query = simt::block() / kBlocks;
  while (query < batch_.num_queries) {
    uint32_t next = kNoSlot;
    if (persistent && leads) next = num_groups + simt::atomic_add(&batch_.counters[0], 1);
    search(query);
    if (persistent && leads)
      for (int b = 0; b < kBlocks; ++b) simt::in_block<kBlocks>(control_, b)->next_query = next;
    simt::sync_group<kBlocks>();
    query = persistent ? control_->next_query : kNoSlot;
  }
  if (!persistent || !leads) return;
  // The group that leaves last makes the counters ready for the next launch.
  if (simt::atomic_increment(&batch_.counters[1], num_groups - 1) == num_groups - 1) batch_.counters[0] = 0;
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::search(uint32_t query) {
  begin(query);
  for (step_ = 0; step_ < num_steps_; ++step_) {
    if (step_ > 0) {
      const uint64_t frontier = leader().frontier[step_ & 1];
      num_beams_ = static_cast<uint32_t>(frontier);
      num_label_groups_ = static_cast<uint32_t>(frontier >> 32);
    }
    if (num_beams_ == 0) break;
    step();
  }
  check_rows(step_ + 1);
  finish();
  lap(kPhaseFinish);
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::begin(uint32_t query) {
#if defined(FLASHTRIE_PHASES)
  lap_start_ = simt::clock();
#endif
  const uint32_t me = simt::thread();
  query_ = query;
  num_steps_ = batch_.step_counts ? batch_.step_counts[query] : batch_.num_steps;
  beam_width_ = batch_.beam_widths ? batch_.beam_widths[query] : batch_.search.beam_width;
  result_limit_ = batch_.result_limits ? batch_.result_limits[query] : batch_.search.num_results;
  grid_ = static_cast<uint64_t>(query) * batch_.num_steps * batch_.num_slots;
  const bool mine = num_steps_ > 0 && me < batch_.num_slots;
  const uint32_t token = mine ? load_token(grid_ + me) : kNoToken;
  const float logprob = mine ? load_logprob(grid_ + me) : -INFINITY;

  table(0).clear();
  table(1).clear();
  for (uint32_t i = me; i < 3 * kBinWords; i += simt::num_threads()) histograms_[i] = 0;
  // All but next_query, which a slower thread may still have to read.
  for (uint32_t i = me; i < offsetof(SearchControl, next_query) / 4; i += simt::num_threads())
    reinterpret_cast<uint32_t*>(control_)[i] = 0;
  const ChildRange root = {1, batch_.root_last};
  if (me == 0) {
    beam_scores_[0] = 0.0f;
    beam_first_[0] = root.first;
    beam_last_[0] = root.last;
    beam_start_[0] = 0;
  }
  num_beams_ = root.fan_out() > 0 ? 1 : 0;
  num_label_groups_ = batch_.root_table && num_beams_ ? batch_.num_slots : num_beams_ ? num_groups(root) : 0;
  round_ = 0;
  result_floor_ = 0;
  budget_ = candidates_.capacity < results_.capacity ? candidates_.capacity : results_.capacity;
  simt::sync_block();
  if (num_steps_ > 0) put_row(0, token, logprob);
  simt::sync_group<kBlocks>();
  lap(kPhaseBegin);
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::step() {
  is_last_ = step_ + 1 == num_steps_;
  candidates_.count = &control_->num_candidates[step_ & 1];
  candidate_floor_ = 0;
  const uint32_t end = control_->end_logprobs[(step_ + 1) & 3];
  can_end_ = batch_.search.eos == kNoToken || (!is_last_ && end != 0);
  end_logprob_ = score_of(end);
  factor_ = batch_.search.length_factors[step_ + 1];
  // The next row's loads are under way while this step is searched.
  const uint32_t me = simt::thread();
  const uint64_t next_row = grid_ + static_cast<uint64_t>(step_ + 1) * batch_.num_slots;
  const bool mine = !is_last_ && me < batch_.num_slots;
  const uint32_t token = mine ? load_token(next_row + me) : kNoToken;
  const float logprob = mine ? load_logprob(next_row + me) : -INFINITY;

  Cursor cursor{simt::rank<kBlocks>() * (simt::num_threads() >> 5) + (me >> 5), 0, 0, 0, 0};
  bool has_row = is_last_;
  for (;;) {
    reset_round();
    expand(cursor);
    lap(kPhaseExpand);
    if (!has_row) put_row(step_ + 1, token, logprob);
    has_row = true;
    lap(kPhaseRow);
    simt::sync_group<kBlocks>();
    lap(kPhaseWait);
    if (control_->full[round_++ & 1] == 0) break;
    prune();
  }
  if (!is_last_) {
    table(step_).clear();
    for (uint32_t i = me; i < kBinWords; i += simt::num_threads()) candidate_histogram(step_ + 1)[i] = 0;
  }

  // The cut among the candidates, and a floor under the results, from one pass over the bins.
  const bool cuts = !is_last_ && group_count(candidates_.count) > beam_width_;
  const bool floors = !is_last_ && group_count(results_.count) > result_limit_;
  const uint32_t* candidate_bins = kBlocks == 1 ? candidate_histogram(step_) : combined(0);
  const uint32_t* result_bins = kBlocks == 1 ? result_histogram() : combined(1);
  if (cuts) sum_chunks<kBlocks>(candidate_histogram(step_), combined(0), control_->candidate_totals);
  if (floors) sum_chunks<kBlocks>(result_histogram(), combined(1), control_->result_totals);
  if (cuts || floors) simt::sync_block();
  uint64_t cut = 0;
  if (cuts) cut = settle(candidates_, locate_cut(candidate_bins, control_->candidate_totals, beam_width_), beam_width_, 0);
  if (floors) {
    const BinCut bins = locate_cut(result_bins, control_->result_totals, result_limit_);
    const uint64_t floor = bins.all ? 0 : bin_start(bins.wanted == 0 ? bins.bin + 1 : bins.bin);
    if (floor > result_floor_) result_floor_ = floor;
  }
  lap(kPhaseCut);
  if (!is_last_) survive(cut);
  set_budget(0);
  simt::sync_group<kBlocks>();
  lap(kPhaseSurvive);
}

// How many matches can be judged for sure before a pool is full. Call it while nobody adds to the pools.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::set_budget(uint32_t num_candidates) {
  const uint32_t room = candidates_.capacity - num_candidates;
  const uint32_t result_room = results_.capacity - *results_.count;
  budget_ = room < result_room ? room : result_room;
}

// What the next round or step counts in, cleared while nobody looks at it.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::reset_round() {
  if (simt::thread() != 0) return;
  control_->matches[(round_ + 1) & 1] = 0;
  control_->full[(round_ + 1) & 1] = 0;
  control_->num_ties[0] = control_->num_ties[1] = 0;
  control_->frontier[(step_ + 1) & 1] = 0;
  control_->num_candidates[(step_ + 1) & 1] = 0;
  control_->end_logprobs[(step_ + 3) & 3] = 0;
}

// Puts a row into its table and looks for the end of sequence in the row behind it, since what ends at step `row`
// takes its log-prob from there. The caller has loaded the slots of the first num_threads().
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::put_row(uint32_t row, uint32_t token, float logprob) {
  const StepTable to = table(row);
  const uint64_t at = grid_ + static_cast<uint64_t>(row) * batch_.num_slots;
  for (uint32_t slot = simt::thread(); slot < batch_.num_slots; slot += simt::num_threads()) {
    if (slot >= simt::num_threads()) {
      token = load_token(at + slot);
      logprob = load_logprob(at + slot);
    }
    if (!(logprob < INFINITY)) {
      simt::atomic_max(&control_->bad_slot, ~(row * batch_.num_slots + slot));
    } else if (slot_extends(batch_.trie, batch_.search, token, logprob)) {
      to.insert(token, logprob, slot);
    }
  }
  if (batch_.search.eos == kNoToken || row + 1 >= num_steps_) return;
  for (uint32_t slot = simt::thread(); slot < batch_.num_slots; slot += simt::num_threads()) {
    const uint64_t behind = at + batch_.num_slots + slot;
    if (load_token(behind) != batch_.search.eos) continue;
    const float end = load_logprob(behind);
    if (end < INFINITY && slot_ends(batch_.search, batch_.search.eos, end))
      simt::atomic_max(&control_->end_logprobs[(row + 1) & 3], ordered_score(end));
  }
}

// A search that ends early has not seen the last rows; a bad log-prob there is an error all the same.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::check_rows(uint32_t from) {
  if (from >= num_steps_ || simt::rank<kBlocks>() != 0) return;
  const uint64_t end = static_cast<uint64_t>(num_steps_) * batch_.num_slots;
  for (uint64_t i = static_cast<uint64_t>(from) * batch_.num_slots + simt::thread(); i < end; i += simt::num_threads())
    if (!(load_logprob(grid_ + i) < INFINITY)) simt::atomic_max(&control_->bad_slot, ~static_cast<uint32_t>(i));
}

// A budget ran out: keep the best of both pools, exactly, and make their last ones floors.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::prune() {
  sum_chunks<kBlocks>(candidate_histogram(step_), combined(0), control_->candidate_totals);
  sum_chunks<kBlocks>(result_histogram(), combined(1), control_->result_totals);
  simt::sync_group<kBlocks>();
  const uint32_t* candidate_bins = kBlocks == 1 ? candidate_histogram(step_) : combined(0);
  const uint32_t* result_bins = kBlocks == 1 ? result_histogram() : combined(1);
  const BinCut candidate_cut = locate_cut(candidate_bins, control_->candidate_totals, beam_width_);
  const BinCut result_cut = locate_cut(result_bins, control_->result_totals, result_limit_);
  uint64_t cut = settle(candidates_, candidate_cut, beam_width_, 0);
  if (cut > candidate_floor_) candidate_floor_ = cut;
  simt::sync_group<kBlocks>();  // the tie list has been read everywhere
  cut = settle(results_, result_cut, result_limit_, 1);
  if (cut > result_floor_) result_floor_ = cut;
  compact(candidates_, candidate_histogram(step_), candidate_floor_);
  compact(results_, result_histogram(), result_floor_);
  set_budget(*candidates_.count);
  simt::sync_group<kBlocks>();
}

// The least key among the n best of the group. All threads of the group; which tie list to use.
template <int kBlocks, bool kSpill>
FT_DEVICE uint64_t GroupSearch<kBlocks, kSpill>::settle(const Pool& pool, const BinCut& cut, uint32_t n, int which) {
  if (cut.all) return 0;
  if (cut.wanted == 0) return bin_start(cut.bin + 1);
  if (cut.in_bin > kMaxTies) return search_cut(pool, n);
  const uint32_t count = *pool.count;
  for (uint32_t i = simt::thread(); i < count; i += simt::num_threads()) {
    const uint64_t key = pool.keys[i];
    if (score_bin(key) != cut.bin) continue;
    const uint32_t at = simt::atomic_add(&leader().num_ties[which], 1);
    for (int b = 0; b < kBlocks; ++b) simt::in_block<kBlocks>(ties_, b)[at] = key;
  }
  simt::sync_group<kBlocks>();
  for (uint32_t i = simt::thread(); i < cut.in_bin; i += simt::num_threads()) {
    const uint64_t key = ties_[i];
    uint32_t better = 0;
    for (uint32_t other = 0; other < cut.in_bin; ++other) better += ties_[other] > key;
    if (better == cut.wanted - 1) control_->cut = key;
  }
  simt::sync_block();
  return control_->cut;
}

// The same, whatever the keys are: one bit at a time. Only where very many scores are alike.
template <int kBlocks, bool kSpill>
FT_DEVICE uint64_t GroupSearch<kBlocks, kSpill>::search_cut(const Pool& pool, uint32_t n) {
  const uint32_t count = *pool.count;
  uint64_t cut = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t trial = cut | (uint64_t(1) << bit);
    uint32_t above = 0;
    for (uint32_t i = simt::thread(); i < count; i += simt::num_threads()) above += pool.keys[i] >= trial;
    if (group_sum(above) >= n) cut = trial;
  }
  return cut;
}

template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::group_sum(uint32_t value) {
  uint32_t* sums = control_->sums;
  // Three sums take turns: one is added to, one may still be read, one is cleared.
  const uint32_t turn = control_->sum_turn;
  value = simt::reduce_add(value);
  simt::sync_block();
  if (simt::lane() == 0) simt::atomic_add(&sums[turn], value);
  if (simt::thread() == 0) {
    sums[(turn + 1) % 3] = 0;
    control_->sum_turn = (turn + 1) % 3;
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
FT_DEVICE void GroupSearch<kBlocks, kSpill>::compact(Pool& pool, uint32_t* histogram, uint64_t cut) {
  const uint32_t me = simt::thread(), count = *pool.count;
  simt::sync_block();
  if (me == 0) *pool.count = 0;
  for (uint32_t i = me; i < kBinWords; i += simt::num_threads()) histogram[i] = 0;
  for (uint32_t from = 0; from < count; from += simt::num_threads()) {
    const uint32_t i = from + me;
    const bool here = i < count;
    const uint64_t key = here ? pool.keys[i] : 0;
    const uint32_t link = here ? pool.links[i] : 0, first = here ? pool.first[i] : 0, second = here ? pool.second[i] : 0;
    simt::sync_block();  // what is written below has been read by now
    push(pool, histogram, here && key >= cut, key, link, first, second);
  }
  simt::sync_block();
}

// The candidates not below the cut become the frontier of the next step, in every block.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::survive(uint64_t cut) {
  const uint32_t count = *candidates_.count, lane = simt::lane();
  for (uint32_t from = simt::thread() & ~31u; from < count; from += simt::num_threads()) {
    const uint32_t i = from + lane;
    const uint64_t key = i < count ? candidates_.keys[i] : 0;
    const bool survives = i < count && key >= cut;
    const uint32_t votes = simt::ballot(survives);
    if (votes == 0) continue;
    const ChildRange range = survives ? ChildRange{candidates_.first[i], candidates_.second[i]} : ChildRange{0, 0};
    const uint32_t groups = survives ? num_groups(range) : 0;
    const uint32_t upto = inclusive_scan(groups);
    uint32_t base = 0, base_groups = 0;
    if (lane == 31) {
      const uint64_t mine = (static_cast<uint64_t>(upto) << 32) | simt::count_ones(votes);
      const uint64_t before = simt::atomic_add(&leader().frontier[(step_ + 1) & 1], mine);
      base = static_cast<uint32_t>(before);
      base_groups = static_cast<uint32_t>(before >> 32);
    }
    base = simt::shuffle(base, 31);
    base_groups = simt::shuffle(base_groups, 31);
    if (!survives) continue;
    const uint32_t beam = base + simt::count_ones(votes & simt::lanes_below());
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      simt::in_block<kBlocks>(beam_scores_, b)[beam] = key_score(key);
      simt::in_block<kBlocks>(beam_first_, b)[beam] = range.first;
      simt::in_block<kBlocks>(beam_last_, b)[beam] = range.last;
      simt::in_block<kBlocks>(beam_start_, b)[beam] = base_groups + upto - groups;
    }
    history_[static_cast<uint64_t>(step_) * batch_.beam_capacity + beam] = candidates_.links[i];
  }
}

template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::load_token(uint64_t at) const {
  if (batch_.token_bytes == 4) return static_cast<const uint32_t*>(batch_.tokens)[at];
  if (batch_.token_bytes == 2) return static_cast<const uint16_t*>(batch_.tokens)[at];
  // What 32 bits cannot hold is no token; -1 stays the padding that it is.
  const int64_t token = static_cast<const int64_t*>(batch_.tokens)[at];
  return token >= -1 && token <= 0xffffffffll ? static_cast<uint32_t>(token) : 0xfffffffeu;
}

template <int kBlocks, bool kSpill>
FT_DEVICE float GroupSearch<kBlocks, kSpill>::load_logprob(uint64_t at) const {
  if (batch_.logprob_bytes == 4) return static_cast<const float*>(batch_.logprobs)[at];
  return simt::half_to_float(static_cast<const uint16_t*>(batch_.logprobs)[at]);
}

template <int kBlocks, bool kSpill>
FT_DEVICE StepTable GroupSearch<kBlocks, kSpill>::table(uint32_t step) const {
  const uint32_t which = step & 1, size = 1u << batch_.log2_table;
  unsigned char* at = tables_ + which * 12 * size;
  return {bitmaps_ + which * kBitmapWords, reinterpret_cast<uint32_t*>(at + 8 * size), reinterpret_cast<uint64_t*>(at),
          batch_.log2_table};
}

// In the instrumented build, charges the leader's cycles since the last lap to a phase.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::lap(SearchPhase phase) {
#if defined(FLASHTRIE_PHASES)
  const int64_t now = simt::clock();
  if (simt::thread() == 0 && simt::rank<kBlocks>() == 0)
    simt::atomic_add(reinterpret_cast<uint64_t*>(batch_.phases) + phase, static_cast<uint64_t>(now - lap_start_));
  lap_start_ = now;
#else
  (void)phase;
#endif
}

}  // namespace flashtrie

#include "search_expand.cuh"
#include "search_finish.cuh"
