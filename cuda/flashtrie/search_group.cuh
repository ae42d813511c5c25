// The beam search of one query by a group of blocks, and of many queries one after another.
//
// A step: warps scan windows of 32 label groups (16 bytes, 8 labels each) against the step's bitmap and list what
// matches; then a thread judges one match, its reads side by side with those of all others; what is still in
// the race goes into two pools, candidates for the next frontier and results, each counted by score bin. One barrier
// later the bins tell the cut, and the survivors become the next frontier. Meanwhile four warps put the next
// row into the other table. Order comes from the rank keys alone, never from threads.
#pragma once
#include "search_batch.cuh"

namespace flashtrie {

enum SearchPhase { kPhaseBegin, kPhaseExpand, kPhaseRow, kPhaseWait, kPhasePrune, kPhaseCut, kPhaseSurvive, kPhaseFinish, kPhases };

// Where a candidate comes from: its slot, and its parent's block in the group and place in that block's frontier.
constexpr int kLinkBlockShift = 12, kLinkBeamShift = 16;
static_assert(kMaxSlots <= 1u << kLinkBlockShift && kMaxBeamWidth <= 1u << kLinkBeamShift, "they fit a link");

// What a thread knows of the search under way; the same in all threads of a block.
struct SearchState {
  // Of the query.
  const void* tokens_ = nullptr;    // of all queries, or of the staged one
  const void* logprobs_ = nullptr;
  uint64_t grid_ = 0;  // its first slot
  uint32_t query_ = 0, num_steps_ = 0, beam_width_ = 0, result_limit_ = 0;
  // Of the step.
  uint32_t step_ = 0, round_ = 0;
  uint32_t num_beams_ = 0, num_label_groups_ = 0;
  bool is_last_ = false, can_end_ = false;
  float end_logprob_ = 0, factor_ = 0;
};

template <int kBlocks, int kWarps, Mode kMode>
class GroupSearch : private SearchState {
 public:
  FT_DEVICE GroupSearch(const SearchBatch& batch, unsigned char* shared, const SearchState& state = SearchState());
  FT_DEVICE void run();

  // Each called through `outlined`, so that the code that always runs lies close together.
  FT_DEVICE void prune();
  FT_DEVICE void put_row(uint32_t row);
  FT_DEVICE void find_end(uint32_t row);
  FT_DEVICE void check_rows(uint32_t from);
  FT_DEVICE uint32_t find_beam(uint32_t group) const;
  FT_DEVICE uint32_t look_for(uint32_t beam, uint32_t slot) const;
  FT_DEVICE uint32_t look_further(uint32_t first_child, uint32_t fan_out, uint32_t slot) const;
  FT_DEVICE void raise_floor(int which, uint32_t share);
  FT_DEVICE uint64_t pool_cut(int which, uint32_t n);
  FT_DEVICE uint64_t search_cut(int which, uint32_t n);
  FT_DEVICE void gather_crowded(uint32_t found);
  FT_DEVICE void sort_crowded(uint32_t count);
  FT_DEVICE void first_round();
  FT_DEVICE void raise_floors();
  FT_DEVICE void next_round();
  FT_DEVICE void begin_round(uint32_t step, bool is_first, uint32_t slot);
  FT_DEVICE void write_other_tokens(uint32_t link, uint32_t depth, uint32_t* to) const;
  FT_DEVICE const SearchState& state() const { return *this; }

 private:
  // 32 label groups, one a lane.
  struct Window {
    simt::Quad labels;
    uint32_t node;    // of the first of the eight labels
    uint32_t beam;
    uint32_t wanted;  // which of the eight are the beam's children; kFound: `node` itself is a match; kAsked: see `ask`
  };
  static constexpr uint32_t kFound = 1u << 8, kAsked = 1u << 9;
  static constexpr uint32_t kExpandWarps = kWarps - kRowWarps;

  // A beam of the next frontier, and what it will have there.
  struct Arrival {
    Beam beam;
    uint32_t groups;  // and kAsks
    uint32_t done;    // slots that it has asked for before
  };

  // Places of the answer that a block writes, [first, end); its hits lie in its pool at a place less `base`.
  struct OwnHits {
    uint32_t base, first, end;
    uint32_t tokens_before;  // of the hits of blocks before
  };

  // What a warp has under way while it expands the frontier, from round to round.
  struct Cursor {
    uint32_t window;  // the next one to load
    bool is_loaded;
    Window loaded;
    uint32_t mask;    // matches of this lane's group not yet queued
    uint32_t node;    // the group's first node
    uint32_t beam;     // and above it, where a slot has been asked for, one more than that
    uint32_t queued;
  };

  FT_DEVICE void search(uint32_t query);
  FT_DEVICE void begin(uint32_t query);
  FT_DEVICE bool step();
  FT_DEVICE void reset_round();
  FT_DEVICE uint32_t* num_candidates() const { return &control().num_candidates[step_ & 1]; }
  FT_DEVICE uint32_t num_entries(int which) const { return which == 0 ? *num_candidates() : control().num_results; }

  // search_row.cuh
  FT_DEVICE uint32_t take_slots(uint32_t row);
  FT_DEVICE void clear_row(uint32_t row, uint32_t place, uint32_t count);
  FT_DEVICE uint32_t put_slot(uint32_t row, uint32_t slot, uint32_t token, float logprob);
  FT_DEVICE uint64_t token_quads() const;
  FT_DEVICE uint64_t grid_quads() const;
  FT_DEVICE simt::Quad staged_part(uint64_t part) const;
  FT_DEVICE void stage_rows(simt::Quad first);
  FT_DEVICE void prefetch_rows() const;
  FT_DEVICE uint32_t load_token(uint64_t at) const;
  FT_DEVICE float load_logprob(uint64_t at) const;
  FT_DEVICE StepTable table(uint32_t step) const;

  // search_expand.cuh
  FT_DEVICE void expand(Cursor& cursor);
  FT_DEVICE Window load_window(uint32_t at) const;
  FT_DEVICE void test_window(Cursor& cursor) const;
  FT_DEVICE bool can_contribute(float beam_score) const;
  FT_DEVICE bool can_reach(float score) const;
  FT_DEVICE uint32_t own_token(uint32_t slot) const;
  FT_DEVICE uint32_t find_root_child(uint32_t slot) const;
  FT_DEVICE Window ask(Window window, const Beam& beam, uint32_t slot) const;
  FT_DEVICE void answer(Cursor& cursor) const;
  FT_DEVICE void judge(bool here, uint32_t node, uint32_t beam_and_slot);
  FT_DEVICE bool is_full() const;
  FT_DEVICE void call_again(uint32_t why);
  FT_DEVICE uint32_t window_stride() const { return step_ == 0 ? kBlocks * kExpandWarps : kExpandWarps; }

  // search_prune.cuh
  FT_DEVICE uint64_t candidate_cut(uint32_t num_candidates);
  FT_DEVICE BinCut group_cut(int which, uint32_t n) const;
  FT_DEVICE void locate(int which, uint32_t n);
  FT_DEVICE void share_totals(int which);
  FT_DEVICE uint32_t group_entries(int which) const;
  FT_DEVICE uint64_t nth_key(const uint64_t* keys, uint32_t count, uint32_t n);
  FT_DEVICE uint32_t group_sum(uint32_t value);
  FT_DEVICE void compact(int which);

  // search_survive.cuh
  FT_DEVICE bool deals_directly() const;
  FT_DEVICE void deal(uint64_t cut);
  FT_DEVICE void survive(uint64_t cut);
  FT_DEVICE void arrange();
  FT_DEVICE Arrival arrival(const Beam& beam) const;
  template <typename ArrivalAt>
  FT_DEVICE uint32_t lay_out(uint32_t step, uint32_t first, uint32_t last, const ArrivalAt& arrival_at);
  FT_DEVICE void note_windows(uint32_t beam, uint32_t start, uint32_t groups);

  // search_pairs.cuh
  FT_DEVICE bool is_heavy() const;
  FT_DEVICE bool has_rest() const { return control().round.goes_on != 0; }
  FT_DEVICE float missing(int which, uint32_t n) const;
  FT_DEVICE float bar_at(uint32_t step, uint32_t slot) const;
  template <typename Reaches>
  FT_DEVICE uint32_t num_slots_where(uint32_t step, float beam_score, const Reaches& reaches) const;
  FT_DEVICE bool is_below_bar(float beam_score, float logprob) const;

  // search_finish.cuh
  FT_DEVICE void finish();
  FT_DEVICE void place_bins();
  FT_DEVICE void deliver();
  FT_DEVICE uint32_t hit_share(uint32_t num_hits) const;
  FT_DEVICE void note_share(uint32_t from, uint32_t to, uint32_t begin, uint32_t end);
  FT_DEVICE void put_hit(uint32_t block, uint32_t at, uint64_t key, uint32_t i);
  FT_DEVICE OwnHits order(uint32_t num_hits);
  FT_DEVICE void write_hits(const OwnHits& own, uint32_t num_hits);
  FT_DEVICE void write_tokens(uint32_t link, uint32_t depth, uint32_t* to) const;
  FT_DEVICE uint32_t parent_link(uint32_t link, uint32_t row) const;

  FT_DEVICE bool is_wide(ChildRange range) const { return range.fan_out() > batch_.scan_limit; }
  FT_DEVICE uint32_t label_groups(ChildRange range) const { return ((range.last - 1) >> 3) - (range.first >> 3) + 1; }
  FT_DEVICE uint32_t num_groups(ChildRange range) const { return is_wide(range) ? batch_.num_slots : label_groups(range); }
  FT_DEVICE void lap(SearchPhase phase);

  using Places = SharedPlaces<kBlocks, kWarps>;

  // Shared memory at fixed places, so that its addresses cost no registers.
  FT_DEVICE SearchControl& control() const { return *reinterpret_cast<SearchControl*>(shared_); }
  FT_DEVICE uint32_t* bitmaps() const { return reinterpret_cast<uint32_t*>(shared_ + Places::kBitmaps); }
  FT_DEVICE uint32_t* histograms() const { return reinterpret_cast<uint32_t*>(shared_ + Places::kHistograms); }
  FT_DEVICE uint32_t* candidate_histogram(uint32_t step) const { return histograms() + (step & 1) * kBinWords; }
  FT_DEVICE uint32_t* result_histogram() const { return histograms() + 2 * kBinWords; }
  FT_DEVICE uint32_t* histogram_of(int which) const { return which == 0 ? candidate_histogram(step_) : result_histogram(); }
  // When no step needs them any more: where the bins of the results begin, where this block's next of each goes, both 16
  // bits a bin, and the hits in order.
  FT_DEVICE uint32_t* bin_starts() const { return histograms(); }
  FT_DEVICE uint32_t* bin_places() const { return histograms() + kBinWords; }
  FT_DEVICE uint32_t bin_start_of(uint32_t bin) const { return bin_starts()[bin >> 1] >> 16 * (bin & 1) & 0xffff; }
  FT_DEVICE uint16_t* sorted() const { return reinterpret_cast<uint16_t*>(bitmaps()); }
  FT_DEVICE uint64_t* ties() const { return reinterpret_cast<uint64_t*>(shared_ + Places::kTies); }
  FT_DEVICE uint16_t* windows() const { return reinterpret_cast<uint16_t*>(shared_ + Places::kWindows); }
  FT_DEVICE uint64_t* queues() const { return reinterpret_cast<uint64_t*>(shared_ + Places::kQueues); }  // beam, node
  FT_DEVICE uint32_t* touched() const { return reinterpret_cast<uint32_t*>(shared_ + Places::kTouched) + simt::thread(); }
  FT_DEVICE unsigned char* tables() const { return kMode == kSpills ? workspace_ : shared_ + Places::kTables; }
  FT_DEVICE unsigned char* large() const { return tables() + 2 * Places::table_bytes(batch_); }
  // The frontier: beams, where their label groups start, and in a cluster what arrives of the next one.
  FT_DEVICE Beam* beams() const { return reinterpret_cast<Beam*>(large()); }
  FT_DEVICE uint32_t* beam_starts(uint32_t step) const {
    return reinterpret_cast<uint32_t*>(beams() + Places::beam_places(batch_)) + (step & 1) * Places::start_places(batch_);
  }
  FT_DEVICE Beam* arrivals() const {
    return reinterpret_cast<Beam*>(beam_starts(0) + 2 * Places::start_places(batch_));
  }
  FT_DEVICE CandidatePool candidates() const {
    return {reinterpret_cast<uint64_t*>(large() + Places::frontier_bytes(batch_)), batch_.candidate_places};
  }
  FT_DEVICE ResultPool results() const {
    unsigned char* at = large() + Places::frontier_bytes(batch_) + CandidatePool::kEntryBytes * batch_.candidate_places;
    return {reinterpret_cast<uint64_t*>(at), batch_.result_places};
  }
  // Row s says where the beams of step s + 1 come from.
  FT_DEVICE uint32_t* history(uint32_t row) const {
    return history_ + static_cast<uint64_t>(row) * Places::beam_places(batch_);
  }

  const SearchBatch& batch_;
  unsigned char* shared_;
  unsigned char* workspace_;
  uint32_t* history_;

  int64_t lap_start_;
};

}  // namespace flashtrie

#include "search_outlined.cuh"

namespace flashtrie {

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE GroupSearch<kBlocks, kWarps, kMode>::GroupSearch(const SearchBatch& batch, unsigned char* shared,
                                                            const SearchState& state)
    : SearchState(state), batch_(batch), shared_(shared) {
  static_assert(kBlocks == 1 || kMode != kSpills, "a cluster reaches shared memory only");
  const uint64_t group = simt::block() / kBlocks;
  workspace_ = batch.workspace + group * batch.workspace_bytes;
  if (kBlocks == 1 && batch.history) {
    history_ = batch.history + group * (batch.max_depth > 0 ? batch.max_depth - 1 : 0) * batch.beam_capacity;
  } else {
    unsigned char* results_end = reinterpret_cast<unsigned char*>(results().keys) + ResultPool::kEntryBytes * batch.result_places;
    history_ = reinterpret_cast<uint32_t*>(results_end);
  }
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::run() {
  const uint32_t num_groups = simt::num_blocks() / kBlocks;
  const bool persistent = batch_.num_queries > num_groups;
  const bool leads = simt::rank<kBlocks>() == 0 && simt::thread() == 0;
  uint32_t query = simt::block() / kBlocks;
#pragma unroll 1
  while (query < batch_.num_queries) {
    uint32_t next = kNoSlot;
    if (persistent && leads) next = num_groups + simt::atomic_add(&batch_.counters[0], 1);
    search(query);
    if (persistent && leads)
      for (int b = 0; b < kBlocks; ++b) simt::in_block<kBlocks>(&control(), b)->next_query = next;
    simt::sync_group<kBlocks>();
    query = persistent ? control().next_query : kNoSlot;
  }
  if (!persistent || !leads) return;
  // The group that leaves last makes the counters ready for the next launch.
  if (simt::atomic_increment(&batch_.counters[1], num_groups - 1) == num_groups - 1) batch_.counters[0] = 0;
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::search(uint32_t query) {
  begin(query);
  bool goes_on = num_beams_ > 0;
#pragma unroll 1
  for (step_ = 0; goes_on && step_ < num_steps_; ++step_) goes_on = step();
  // `step_` rows have been looked at, and one more where the search did not go on to it.
  if (step_ + 1 < num_steps_) check_rows_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state());
  finish();
  lap(kPhaseFinish);
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::begin(uint32_t query) {
#if defined(FLASHTRIE_PHASES)
  lap_start_ = simt::clock();
#endif
  const uint32_t me = simt::thread();
  query_ = query;
  num_steps_ = batch_.step_counts ? batch_.step_counts[query] : batch_.num_steps;
  beam_width_ = batch_.beam_widths ? batch_.beam_widths[query] : batch_.search.beam_width;
  result_limit_ = batch_.result_limits ? batch_.result_limits[query] : batch_.search.num_results;
  grid_ = static_cast<uint64_t>(query) * batch_.num_steps * batch_.num_slots;
  tokens_ = batch_.tokens;
  logprobs_ = batch_.logprobs;
  // What comes over the bus is on its way while memory is cleared: of the grid a part a thread, and the first slots.
  const bool is_staged = batch_.stage != nullptr;
  const simt::Quad staged = is_staged ? staged_part(simt::rank<kBlocks>() * kWarps * 32 + me) : simt::Quad{};
  if (!is_staged) prefetch_rows();
  constexpr uint32_t kAtOnce = kBlocks == 1 ? 1 : 2;  // slots a thread
  uint32_t tokens[kAtOnce];
  float logprobs[kAtOnce];
#pragma unroll
  for (uint32_t i = 0; i < kAtOnce; ++i) {
    const uint32_t slot = i * kWarps * 32 + me;
    const bool mine = num_steps_ > 0 && slot < batch_.num_slots;
    tokens[i] = mine ? load_token(grid_ + slot) : kNoToken;
    logprobs[i] = mine ? load_logprob(grid_ + slot) : -INFINITY;
  }
#pragma unroll 2
  for (uint32_t i = me; i < kBinWords / 4; i += simt::num_threads())
    reinterpret_cast<simt::Quad*>(result_histogram())[i] = {0, 0, 0, 0};
  if (me < kWindowPlaces * 2 / 16) reinterpret_cast<simt::Quad*>(windows())[me] = {0, 0, 0, 0};
  // All but next_query, which a slower thread may still have to read.
#pragma unroll 1
  for (uint32_t i = me; i < offsetof(SearchControl, next_query) / 4; i += simt::num_threads())
    reinterpret_cast<uint32_t*>(&control())[i] = 0;
  const ChildRange root = {1, batch_.root_last};
  if (me == 0) {
    beams()[0] = {0.0f, root.first, root.last, is_wide(root) ? kAsks : 0};
  }
  for (uint32_t i = me; i < 2 * Places::start_places(batch_); i += simt::num_threads())
    beam_starts(0)[i] = kNoSlot;
  num_beams_ = root.fan_out() > 0 ? 1 : 0;
  num_label_groups_ = batch_.root_table && num_beams_ ? batch_.num_slots : num_beams_ ? num_groups(root) : 0;
  round_ = 0;
  step_ = 0;
  clear_row(0, me, kWarps * 32);
  clear_row(1, me, kWarps * 32);
  if (me == 0) beam_starts(0)[0] = 0;
  if (is_staged) {
    stage_rows(staged);
    simt::sync_group<kBlocks>();
  } else {
    simt::sync_block();
  }
  if (num_steps_ > 0) {
    uint32_t best = 0;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t slot = i * kWarps * 32 + me;
      const uint32_t put = slot < batch_.num_slots ? put_slot(0, slot, tokens[i], logprobs[i]) : 0;
      best = put > best ? put : best;
    }
    best = simt::reduce_max(best);
    if (simt::lane() == 0) simt::atomic_max(&control().best_logprobs[0], best);
    if (me == 0) control().row_taken[0] = kAtOnce * kWarps * 32;
    if (batch_.search.eos != kNoToken) find_end_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), 0);
    simt::sync_block();
    if (batch_.num_slots > kAtOnce * kWarps * 32) {
      put_row_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), 0);
      simt::sync_block();
    }
  }
  simt::sync_group<kBlocks>();
  lap(kPhaseBegin);
}

// Whether there is a frontier for another step.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE bool GroupSearch<kBlocks, kWarps, kMode>::step() {
  is_last_ = step_ + 1 == num_steps_;
  const uint32_t end = control().end_logprobs[(step_ + 1) & 3];
  can_end_ = batch_.search.eos == kNoToken || (!is_last_ && end != 0);
  end_logprob_ = score_of(end);
  factor_ = batch_.search.length_factors[step_ + 1];
  const uint32_t me = simt::thread(), warp = me >> 5;
  Cursor cursor{};
  cursor.window = step_ == 0 ? warp * kBlocks + simt::rank<kBlocks>() : warp;
  bool has_row = is_last_;
#pragma unroll 1
  for (;;) {
    reset_round();
    if (warp < kExpandWarps) expand(cursor);
    lap(kPhaseExpand);
    // Four warps come here at once, the others when they have nothing left to expand.
    if (!has_row && simt::any(control().row_taken[(step_ + 1) & 1] < batch_.num_slots)) {
      put_row_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), step_ + 1);
    }
    if (!has_row && batch_.search.eos != kNoToken && warp >= kExpandWarps)
      find_end_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state(), step_ + 1);
    has_row = true;
    lap(kPhaseRow);
    simt::sync_block();
    if (kBlocks > 1) {
      share_totals(0);
      simt::sync_group<kBlocks>();
    }
    lap(kPhaseWait);
    const uint32_t again = control().again[round_ & 1];
    const bool is_through = kMode == kPairs && control().unfinished[round_ & 1] == 0;
    ++round_;
    if (again == 0) break;
    simt::sync_block();  // the flags have been read
    if (kMode != kPairs || (again & kPoolFull))
      prune_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state());
    else
      raise_floors_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state());
    if (is_through && has_rest()) {
      next_round_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state());
      num_label_groups_ = control().round.label_groups;
      if (kBlocks == 1 && num_label_groups_ == 0 && !has_rest()) {
        simt::sync_block();  // the round, which is cleared next, has been read
        break;
      }
      cursor = Cursor{};
      cursor.window = warp;
    }
    lap(kPhasePrune);
  }
  if (is_last_) return false;
  // By the warps that have least to do next.
  if (warp >= kRowWarps) clear_row(step_, me - kRowWarps * 32, kExpandWarps * 32);
  const uint32_t num_candidates = group_entries(0);
  if (me < 8) control().floor_bins[0][me] = 0;
  if (me == 8) control().floors[0] = 0;
  if (kMode == kPairs && me == 9) control().round = {};
  const uint64_t cut = candidate_cut(num_candidates);
  lap(kPhaseCut);
  if (deals_directly()) {
    deal(cut);
  } else {
    survive(cut);
    simt::sync_group<kBlocks>();
    arrange();
  }
  if (kMode == kPairs && is_heavy()) {
    first_round_outlined<kBlocks, kWarps, kMode>(batch_, shared_, state());
    num_label_groups_ = control().round.label_groups;
  }
  lap(kPhaseSurvive);
  return num_candidates > 0;
}

// What the next round or step counts in, cleared while nobody looks at it.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::reset_round() {
  const uint32_t me = simt::thread();
  if (me < 8) control().received[me] = 0;
  if (me != 8) return;
  control().again[(round_ + 1) & 1] = control().unfinished[(round_ + 1) & 1] = 0;
  control().num_ties[0] = control().num_ties[1] = 0;
  control().num_survivors = 0;
  control().frontier[(step_ + 1) & 1] = 0;
  control().num_candidates[(step_ + 1) & 1] = 0;
  control().end_logprobs[(step_ + 3) & 3] = 0;
}

// In the instrumented build, charges the leader's cycles since the last lap to a phase.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::lap(SearchPhase phase) {
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
#include "search_pairs.cuh"
#include "search_prune.cuh"
#include "search_row.cuh"
#include "search_survive.cuh"
