// The beam search of one query by a group of blocks, and of many queries one after another.
//
// A step: warps scan windows of 32 label groups (16 bytes, 8 labels each) against the step's bitmap and list what
// matches; then a thread judges one match, its reads side by side with those of all others; what is still in
// the race goes into two pools, candidates for the next frontier and results, each counted by score bin. One barrier
// later the bins tell the cut, and the survivors become the next frontier. Meanwhile four warps put the next
// row into the other table. Order comes from the rank keys alone, never from threads.
#pragma once
#include "louds_window.cuh"
#include "search_batch.cuh"
#include "step_table.cuh"

namespace flashtrie {

enum SearchPhase { kPhaseBegin, kPhaseExpand, kPhaseRow, kPhaseWait, kPhasePrune, kPhaseCut, kPhaseSurvive, kPhaseFinish, kPhases };

// What a thread knows of the search under way; the same in all threads of a group.
struct SearchState {
  // Of the query.
  uint64_t grid_ = 0;  // its first slot
  uint32_t query_ = 0, num_steps_ = 0, beam_width_ = 0, result_limit_ = 0;
  uint64_t result_floor_ = 0;
  // Of the step.
  uint32_t step_ = 0, round_ = 0, num_beams_ = 0, num_label_groups_ = 0;
  uint32_t floored_results_ = 0;  // results when their floor was last raised
  uint64_t candidate_floor_ = 0;
  bool is_last_ = false, can_end_ = false;
  float end_logprob_ = 0, factor_ = 0;
};

template <int kBlocks, bool kSpill>
class GroupSearch : private SearchState {
 public:
  FT_DEVICE GroupSearch(const SearchBatch& batch, unsigned char* shared, const SearchState& state = SearchState());
  FT_DEVICE void run();

  // Rare parts, each called through `outlined`, so that the code that always runs lies close together.
  FT_DEVICE void prune();
  FT_DEVICE void check_rows(uint32_t from);
  FT_DEVICE void put_row(uint32_t row);
  FT_DEVICE uint64_t search_cut(const Pool& pool, uint32_t n);
  FT_DEVICE void sort_crowded(uint32_t num_hits);
  FT_DEVICE const SearchState& state() const { return *this; }
  FT_DEVICE Pool candidates() const {
    return {reinterpret_cast<uint64_t*>(large() + 16 * batch_.beam_capacity), &control().num_candidates[step_ & 1],
            batch_.candidate_places};
  }
  FT_DEVICE Pool results() const {
    unsigned char* at = large() + 16 * batch_.beam_capacity + kEntryBytes * batch_.candidate_places;
    return {reinterpret_cast<uint64_t*>(at), &control().num_results, batch_.result_places};
  }

 private:
  // 32 label groups, one a lane.
  struct Window {
    simt::Quad labels;
    uint32_t node;    // of the first of the eight labels
    uint32_t beam;
    uint32_t wanted;  // which of the eight are the beam's children; kFound: `node` itself is a match
  };
  static constexpr uint32_t kFound = 1u << 8;

  // What a warp has under way while it expands the frontier, from round to round.
  struct Cursor {
    uint32_t window;  // the next one to load
    bool is_loaded;
    Window loaded;
    uint32_t mask;    // matches of this lane's group not yet queued
    uint32_t node;    // the group's first node
    uint32_t beam;
    uint32_t queued;
  };

  FT_DEVICE void search(uint32_t query);
  FT_DEVICE void begin(uint32_t query);
  FT_DEVICE void step();
  FT_DEVICE void reset_round();
  FT_DEVICE void put_slot(uint32_t row, uint32_t slot, uint32_t token, float logprob);
  FT_DEVICE void settle_repeats(uint32_t row);
  FT_DEVICE void survive(uint64_t cut);
  FT_DEVICE void compact(const Pool& pool, uint32_t* histogram, uint64_t cut);
  FT_DEVICE uint64_t settle(const Pool& pool, const BinCut& cut, uint32_t n, int which);
  FT_DEVICE uint64_t nth_key(const uint64_t* keys, uint32_t count, uint32_t n);
  FT_DEVICE uint32_t group_sum(uint32_t value);
  FT_DEVICE uint32_t group_count(const uint32_t* count) const;

  // search_expand.cuh
  FT_DEVICE void expand(Cursor& cursor);
  FT_DEVICE Window load_window(uint32_t at) const;
  FT_DEVICE void test_window(Cursor& cursor) const;
  FT_DEVICE uint32_t find_beam(uint32_t group) const;
  FT_DEVICE uint32_t find_wide(ChildRange range, uint32_t slot) const;
  FT_DEVICE void judge(bool here, uint32_t node, uint32_t beam);
  FT_DEVICE bool is_full() const;
  FT_DEVICE void call_again();
  FT_DEVICE void raise_floor(const uint32_t* histogram, uint32_t n, uint32_t* floor) const;
  FT_DEVICE uint32_t push(const Pool& pool, uint32_t* histogram, bool wanted, uint64_t key, uint32_t link, uint32_t first,
                          uint32_t second);

  // search_finish.cuh
  FT_DEVICE void finish();
  FT_DEVICE void gather(uint64_t cut);
  FT_DEVICE void sort(uint32_t num_hits);
  FT_DEVICE void rank_all(uint32_t num_gathered, uint32_t num_hits);
  FT_DEVICE void write_hits(uint32_t num_hits);
  FT_DEVICE void write_tokens(uint32_t link, uint32_t depth, uint32_t* to) const;

  FT_DEVICE uint32_t load_token(uint64_t at) const;
  FT_DEVICE float load_logprob(uint64_t at) const;
  FT_DEVICE StepTable table(uint32_t step) const;
  FT_DEVICE uint32_t* candidate_histogram(uint32_t step) const { return histograms() + (step & 1) * kBinWords; }
  FT_DEVICE uint32_t* result_histogram() const { return histograms() + 2 * kBinWords; }
  FT_DEVICE uint32_t* combined(int which) const { return histograms() + (3 + which) * kBinWords; }
  FT_DEVICE bool is_wide(ChildRange range) const { return range.fan_out() > batch_.scan_limit; }
  FT_DEVICE uint32_t num_groups(ChildRange range) const {
    return is_wide(range) ? batch_.num_slots : ((range.last - 1) >> 3) - (range.first >> 3) + 1;
  }
  FT_DEVICE SearchControl& leader() const { return *simt::in_block<kBlocks>(&control(), 0); }
  FT_DEVICE void lap(SearchPhase phase);

  using Places = SharedPlaces<kBlocks>;

  // Shared memory at fixed places, so that its addresses cost no registers.
  FT_DEVICE SearchControl& control() const { return *reinterpret_cast<SearchControl*>(shared_); }
  FT_DEVICE uint32_t* bitmaps() const { return reinterpret_cast<uint32_t*>(shared_ + Places::kBitmaps); }
  FT_DEVICE uint32_t* histograms() const { return reinterpret_cast<uint32_t*>(shared_ + Places::kHistograms); }
  FT_DEVICE uint64_t* ties() const { return reinterpret_cast<uint64_t*>(shared_ + Places::kTies); }
  FT_DEVICE uint64_t* queues() const { return reinterpret_cast<uint64_t*>(shared_ + Places::kQueues); }  // beam, node
  FT_DEVICE unsigned char* tables() const { return kSpill ? workspace_ : shared_ + Places::kTables; }
  FT_DEVICE unsigned char* large() const { return tables() + Places::table_bytes(batch_); }
  // The frontier, by beam.
  FT_DEVICE float* beam_scores() const { return reinterpret_cast<float*>(large()); }
  FT_DEVICE uint32_t* beam_first() const { return reinterpret_cast<uint32_t*>(large()) + batch_.beam_capacity; }
  FT_DEVICE uint32_t* beam_last() const { return beam_first() + batch_.beam_capacity; }
  FT_DEVICE uint32_t* beam_start() const { return beam_last() + batch_.beam_capacity; }  // its first label group
  // Row s is the frontier of step s + 1: parent << 16 | slot. The leader's.
  FT_DEVICE uint32_t* history(uint32_t row) const { return history_ + static_cast<uint64_t>(row) * batch_.beam_capacity; }

  const SearchBatch& batch_;
  unsigned char* shared_;
  unsigned char* workspace_;
  uint32_t* history_;

  int64_t lap_start_;
};

FT_OUTLINE uint32_t load_other_token(const SearchBatch& batch, uint64_t at) {
  if (batch.token_bytes == 2) return static_cast<const uint16_t*>(batch.tokens)[at];
  // What 32 bits cannot hold is no token; -1 stays the padding that it is.
  const int64_t token = static_cast<const int64_t*>(batch.tokens)[at];
  return token >= -1 && token <= 0xffffffffll ? static_cast<uint32_t>(token) : 0xfffffffeu;
}

// The rare parts as functions of their own, on a copy of the state: a member function that is not inlined would keep
// the state in memory for all others too.
template <int kBlocks, bool kSpill>
FT_OUTLINE void prune_outlined(const SearchBatch& batch, unsigned char* shared, SearchState& state) {
  GroupSearch<kBlocks, kSpill> search(batch, shared, state);
  search.prune();
  state = search.state();
}
template <int kBlocks, bool kSpill>
FT_OUTLINE void check_rows_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState& state) {
  GroupSearch<kBlocks, kSpill>(batch, shared, state).check_rows(state.step_ + 1);
}
template <int kBlocks, bool kSpill>
FT_OUTLINE void put_row_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState& state, uint32_t row) {
  GroupSearch<kBlocks, kSpill>(batch, shared, state).put_row(row);
}
template <int kBlocks, bool kSpill>
FT_OUTLINE uint64_t search_cut_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState& state,
                                        uint32_t n, int which) {
  GroupSearch<kBlocks, kSpill> search(batch, shared, state);
  return search.search_cut(which == 0 ? search.candidates() : search.results(), n);
}
template <int kBlocks, bool kSpill>
FT_OUTLINE void sort_crowded_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState& state,
                                      uint32_t num_hits) {
  GroupSearch<kBlocks, kSpill>(batch, shared, state).sort_crowded(num_hits);
}

template <int kBlocks, bool kSpill>
FT_DEVICE GroupSearch<kBlocks, kSpill>::GroupSearch(const SearchBatch& batch, unsigned char* shared,
                                                    const SearchState& state)
    : SearchState(state), batch_(batch), shared_(shared) {
  static_assert(kBlocks == 1 || !kSpill, "a cluster reaches shared memory only");
  const uint64_t group = simt::block() / kBlocks;
  workspace_ = batch.workspace + group * batch.workspace_bytes;
  if (batch.history) {
    history_ = batch.history + group * (batch.max_depth > 0 ? batch.max_depth - 1 : 0) * batch.beam_capacity;
  } else {
    const uint32_t entries = batch.candidate_places + batch.result_places;
    unsigned char* behind = large() + 16 * batch.beam_capacity + kEntryBytes * entries;
    history_ = simt::in_block<kBlocks>(reinterpret_cast<uint32_t*>(behind), 0);
  }
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::run() {
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

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::search(uint32_t query) {
  begin(query);
#pragma unroll 1
  for (step_ = 0; step_ < num_steps_; ++step_) {
    if (step_ > 0) {
      const uint64_t frontier = leader().frontier[step_ & 1];
      num_beams_ = static_cast<uint32_t>(frontier);
      num_label_groups_ = static_cast<uint32_t>(frontier >> 32);
    }
    if (num_beams_ == 0) break;
    step();
  }
  if (step_ + 1 < num_steps_) check_rows_outlined<kBlocks, kSpill>(batch_, shared_, SearchState(*this));
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
  // The first row comes while memory is cleared; what of it a thread each cannot hold, put_row fetches.
  const bool mine = num_steps_ > 0 && me < batch_.num_slots;
  const uint32_t token = mine ? load_token(grid_ + me) : kNoToken;
  const float logprob = mine ? load_logprob(grid_ + me) : -INFINITY;
  table(0).clear();
  table(1).clear();
#pragma unroll 1
  for (uint32_t i = me; i < 3 * kBinWords; i += simt::num_threads()) histograms()[i] = 0;
  // All but next_query, which a slower thread may still have to read.
#pragma unroll 1
  for (uint32_t i = me; i < offsetof(SearchControl, next_query) / 4; i += simt::num_threads())
    reinterpret_cast<uint32_t*>(&control())[i] = 0;
  const ChildRange root = {1, batch_.root_last};
  if (me == 0) {
    beam_scores()[0] = 0.0f;
    beam_first()[0] = root.first;
    beam_last()[0] = root.last;
    beam_start()[0] = 0;
  }
  num_beams_ = root.fan_out() > 0 ? 1 : 0;
  num_label_groups_ = batch_.root_table && num_beams_ ? batch_.num_slots : num_beams_ ? num_groups(root) : 0;
  round_ = 0;
  result_floor_ = 0;
  floored_results_ = 0;
  simt::sync_block();
  if (num_steps_ > 0) {
    if (mine) put_slot(0, me, token, logprob);
    const bool ends = batch_.search.eos != kNoToken;
    if (me == 0) control().row_taken[0] = ends ? 0 : simt::num_threads();
    simt::sync_block();
    if (ends || batch_.num_slots > simt::num_threads()) {
      put_row_outlined<kBlocks, kSpill>(batch_, shared_, SearchState(*this), 0);
      simt::sync_block();
    }
    settle_repeats(0);
  }
  simt::sync_group<kBlocks>();
  lap(kPhaseBegin);
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::step() {
  is_last_ = step_ + 1 == num_steps_;
  candidate_floor_ = 0;
  const uint32_t end = control().end_logprobs[(step_ + 1) & 3];
  can_end_ = batch_.search.eos == kNoToken || (!is_last_ && end != 0);
  end_logprob_ = score_of(end);
  factor_ = batch_.search.length_factors[step_ + 1];
  const uint32_t me = simt::thread(), num_warps = simt::num_threads() >> 5;
  const uint32_t expanding = num_warps - kRowWarps;
  Cursor cursor{};
  cursor.window = simt::rank<kBlocks>() * expanding + (me >> 5);
  bool has_row = is_last_;
#pragma unroll 1
  for (;;) {
    reset_round();
    if ((me >> 5) < expanding) expand(cursor);
    lap(kPhaseExpand);
    // Four warps come here at once, the others when they have nothing left to expand.
    if (!has_row && simt::any(control().row_taken[(step_ + 1) & 1] < batch_.num_slots))
      put_row_outlined<kBlocks, kSpill>(batch_, shared_, SearchState(*this), step_ + 1);
    has_row = true;
    lap(kPhaseRow);
    simt::sync_group<kBlocks>();
    lap(kPhaseWait);
    const bool again = control().again[round_++ & 1] != 0;
    if (!again) break;
    simt::sync_block();  // the flag has been read
    SearchState state(*this);
    prune_outlined<kBlocks, kSpill>(batch_, shared_, state);
    static_cast<SearchState&>(*this) = state;
    lap(kPhasePrune);
  }
  if (!is_last_) {
    settle_repeats(step_ + 1);
    table(step_).clear();
    if (me < kBinWords / 4) reinterpret_cast<simt::Quad*>(candidate_histogram(step_ + 1))[me] = {0, 0, 0, 0};
  }

  // The cut among the candidates, and a floor under the results, from one pass over the bins.
  const uint32_t num_candidates = group_count(candidates().count);
  const bool is_small = kBlocks == 1 && num_candidates <= kCompareAll;
  const bool cuts = !is_last_ && num_candidates > beam_width_ && !is_small;
  const uint32_t num_results = group_count(results().count);
  // A floor under the results pays only when their pools fill up.
  const bool floors = !is_last_ && num_results > result_limit_ && 2 * num_results > kBlocks * results().capacity &&
                      num_results > floored_results_ + floored_results_ / 4;
  const uint32_t* candidate_bins = kBlocks == 1 ? candidate_histogram(step_) : combined(0);
  const uint32_t* result_bins = kBlocks == 1 ? result_histogram() : combined(1);
  if (cuts) sum_chunks<kBlocks>(candidate_histogram(step_), combined(0), control().candidate_totals);
  if (floors) sum_chunks<kBlocks>(result_histogram(), combined(1), control().result_totals);
  if (cuts || floors) simt::sync_block();
  uint64_t cut = 0;
  if (!is_last_ && num_candidates > beam_width_ && is_small) cut = nth_key(candidates().keys, num_candidates, beam_width_);
  if (cuts) cut = settle(candidates(), locate_cut(candidate_bins, control().candidate_totals, beam_width_), beam_width_, 0);
  if (floors) {
    const BinCut bins = locate_cut(result_bins, control().result_totals, result_limit_);
    const uint64_t floor = bins.all ? 0 : bin_start(bins.wanted == 0 ? bins.bin + 1 : bins.bin);
    if (floor > result_floor_) result_floor_ = floor;
    floored_results_ = num_results;
  }
  lap(kPhaseCut);
  if (!is_last_) survive(cut);
  simt::sync_group<kBlocks>();
  lap(kPhaseSurvive);
}

// What the next round or step counts in, cleared while nobody looks at it.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::reset_round() {
  if (simt::thread() != 0) return;
  control().again[(round_ + 1) & 1] = 0;
  control().row_taken[step_ & 1] = 0;
  control().num_repeats[step_ & 1] = 0;
  control().num_ties[0] = control().num_ties[1] = 0;
  control().frontier[(step_ + 1) & 1] = 0;
  control().num_candidates[(step_ + 1) & 1] = 0;
  control().candidate_floor[(step_ + 1) & 1] = 0;
  control().end_logprobs[(step_ + 3) & 3] = 0;
}

// The candidates not below the cut become the frontier of the next step, in every block.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::survive(uint64_t cut) {
  const uint32_t count = *candidates().count, lane = simt::lane();
#pragma unroll 1
  for (uint32_t from = simt::thread() & ~31u; from < count; from += simt::num_threads()) {
    const uint32_t i = from + lane;
    const uint64_t key = i < count ? candidates().keys[i] : 0;
    const bool survives = i < count && key >= cut;
    const uint32_t votes = simt::ballot(survives);
    if (votes == 0) continue;
    const ChildRange range = survives ? ChildRange{candidates().first()[i], candidates().second()[i]} : ChildRange{0, 0};
    simt::Quad line{};
    if (survives)
      line = simt::load_quad(reinterpret_cast<const unsigned char*>(&batch_.trie.lines[range.first >> 6]) + 16);
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
      simt::in_block<kBlocks>(beam_scores(), b)[beam] = key_score(key);
      simt::in_block<kBlocks>(beam_first(), b)[beam] = range.first;
      simt::in_block<kBlocks>(beam_last(), b)[beam] = range.last;
      simt::in_block<kBlocks>(beam_start(), b)[beam] = base_groups + upto - groups;
    }
    history(step_)[beam] = candidates().links()[i];
    // What the judge of the first children reads second; where all have a high part, that is the place exactly.
    if (line.z == kNotWide)
      simt::prefetch(batch_.trie.louds + (LoudsWindow::first_bit(range.first, line.y) >> 6));
    if (batch_.trie.high_width > 0) {
      const uint64_t rank = static_cast<uint64_t>(line.w) + (range.first & 63);
      simt::prefetch(batch_.trie.high_bits + (rank * batch_.trie.high_width >> 6));
    }
  }
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
#include "search_prune.cuh"
#include "search_row.cuh"
