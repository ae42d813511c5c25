// What the search kernel is given, and how it divides its memory. The Python twin of SearchBatch and of the sizes
// is in flashtrie_cli/engine/cuda_layout.py; a test holds the two together.
#pragma once
#include "child_table.cuh"
#include "pool.cuh"
#include "step_table.cuh"
#include "search.cuh"

namespace flashtrie {

constexpr uint32_t kQueuePlaces = 96;    // matches that wait to be judged, a warp: fewer than 32, and two a lane more
constexpr uint32_t kRowWarps = 4;        // warps that load the next row while the others expand
constexpr uint32_t kWindowPlaces = 1024; // windows of 32 label groups whose first beam is noted
constexpr uint32_t kPoolFull = 1, kMoreRounds = 2;
constexpr uint32_t kMaxBeamWidth = 4096;
constexpr uint32_t kMaxSlots = 4096;
constexpr uint32_t kNoSlot = 0xffffffffu;
constexpr int kBeamBits = 13;  // of a frontier's count
constexpr uint32_t kStartsBehind = 36;  // entries behind the beams' starts, larger than any

// Where a group keeps frontier and pools, and how it expands a frontier.
enum Mode {
  kShared,  // in shared memory
  kSpills,  // in global memory
  kPairs,   // in shared memory, and frontiers with very many label groups by pairs; see search_pairs.cuh
};

struct SearchBatch {
  TrieView trie;
  SearchParams search;
  const uint32_t* tags;          // by node, see node_tags.cuh
  const LineHead* heads;         // by 64 nodes
  ChildTable children;
  const uint32_t* root_table;    // first child of the root with a label >= i << root_shift; null: the root is scanned
  const void* tokens;            // [num_queries, num_steps, num_slots], token_bytes each
  const void* logprobs;          // the same, logprob_bytes each
  const uint32_t* beam_widths;   // by query; null: search.beam_width for all
  const uint32_t* result_limits; // by query; null: search.num_results for all
  const uint32_t* step_counts;   // by query; null: num_steps for all
  unsigned char* stage;          // room for the grid of the only query, which then lies in the host's memory; else null
  uint32_t* counters;            // next query, groups that are done; both 0 before and after
  uint32_t* history;             // (max_depth - 1) x beam_capacity a group of one block; null: in shared memory
  unsigned char* workspace;      // workspace_bytes a group: tables, frontier, pools; null: in shared memory
  uint32_t* num_hits;            // by query
  uint32_t* num_tokens;          // by query: over its hits
  uint32_t* bad_slots;           // by query: step * num_slots + slot of the first NaN or +inf, or kNoSlot
  uint32_t* key_ids;             // [num_queries, result_capacity], as the next three
  float* scores;
  float* normalised_scores;
  uint32_t* token_ends;          // where the hit's tokens end, counted from the query's first
  uint32_t* hit_tokens;          // [num_queries, result_capacity * max_depth]
  int64_t* phases;               // cycles by phase, in the instrumented build; else null
  uint64_t workspace_bytes;
  uint32_t root_last;            // the root's children are [1, root_last)
  uint32_t root_places;          // entries of root_table but one
  int32_t root_shift;
  uint32_t scan_limit;           // children of a larger fan-out, at least children.fan_out, are asked for proposals, not scanned
  uint32_t num_queries, num_steps, num_slots;
  uint32_t max_depth;            // most tokens of a hit: the trie's depth or num_steps, whichever is less
  uint32_t token_bytes;          // 2, 4 or 8
  uint32_t logprob_bytes;        // 2 or 4
  uint32_t beam_capacity;        // at least every beam width; a multiple of 32
  uint32_t result_capacity;      // at least every result limit; a multiple of 4, as the next two
  uint32_t candidate_places;     // at least both capacities and, twice, 32 a warp that expands more
  uint32_t result_places;        // at least result_capacity and as many more
  int32_t log2_table;            // places of a step table: at least twice num_slots
  uint32_t heavy_groups;         // label groups of a block's frontier from which on it is expanded by pairs
  uint32_t bar_slot;             // whose log-prob sets the bar of its first round
  uint32_t ask_cost;             // label groups scanned in the time of asking for one proposal
  uint32_t shared_hits;          // hits from which on the blocks of a cluster share in writing them
};

// Which pairs of a beam and a proposal a heavy frontier is expanded by now.
struct PairRound {
  float bar;              // those that reach it, and were in no round before
  uint32_t slot;          // whose log-prob has set it
  uint32_t rises;         // somewhere in the row a log-prob is larger than the one before
  uint32_t goes_on;       // there is another round; in the last one, floors take the bar's place
  uint32_t has_work;
  uint32_t label_groups;
};

// State of one block that its threads share. 64 bits first, so that both floors are one read.
struct alignas(16) SearchControl {
  uint64_t floors[2];          // least keys that can still be among the best: candidates, results
  uint64_t cut;
  uint32_t num_candidates[2];  // by step parity
  uint32_t num_results;
  uint32_t frontier[2];        // by step parity, where it is dealt directly: beams, label groups << kBeamBits
  uint32_t num_survivors;      // candidates of this block that the next frontier takes
  uint32_t again[2];           // by round parity, kPoolFull and kMoreRounds: why the group goes round again
  uint32_t unfinished[2];      // by round parity: a warp of this block has not come to the end of its round
  PairRound round;
  uint32_t num_ties[2];        // candidates, results
  uint32_t row_taken[2];       // by parity of the row: slots that a warp has taken
  uint32_t best_logprobs[2];   // by parity of the row, ordered: no slot of the row has more
  uint32_t end_logprobs[4];    // by step: ordered log-prob of the end of sequence, 0 where not proposed
  uint32_t bad_slot;           // complement of the first slot with a NaN or +inf; 0: none
  uint32_t bin, wanted, in_bin, tie_base;  // of the cut
  uint32_t sums[3], sum_turn;
  uint32_t num_gathered;
  uint32_t num_found, most_in_bin;  // results of the group; of those that matter, most in a bin
  uint32_t own_first, own_end;      // where among them those begin and end that this block writes; 0: behind all
  uint32_t own_tokens[8];           // by block: tokens of the hits that it writes
  uint32_t received[8];        // by block of the group: beams that it sent
  uint32_t group_counts[8];    // by block: its candidates, results << 16
  uint32_t floor_bins[2][8];   // by block: a bin that so many of its entries reach that those of the group are n
  uint32_t chunk_totals[2][8][kChunks];  // candidates, results; by block: entries of its histogram
  uint32_t warp_sums[kChunks];
  uint32_t next_query;  // the last, and not cleared between queries
};

// A beam: its score, its children, and the first of the step's label groups that are its.
struct alignas(16) Beam {
  float score;
  uint32_t first, last;
  uint32_t start;  // and kAsks; while it is on its way to the next frontier: where it comes from
};

// Its groups are slots of the row, and each is looked for. `start` is where the row's first slot would be.
constexpr uint32_t kAsks = 1u << 31;

// Where the parts of a block's shared memory begin, in bytes. First those of fixed size; then, unless they are in the
// workspace, in this order too, the step tables, the frontier, both pools and the history.
template <int kBlocks, int kWarps>
struct SharedPlaces {
  static constexpr uint32_t kBitmaps = (sizeof(SearchControl) + 15) / 16 * 16;
  static constexpr uint32_t kHistograms = kBitmaps + 2 * kBitmapWords * 4;
  static constexpr uint32_t kTies = kHistograms + 3 * kBinWords * 4;
  static constexpr uint32_t kWindows = kTies + kMaxTies * 8;
  static constexpr uint32_t kQueues = kWindows + kWindowPlaces * 2;
  static constexpr uint32_t kTouched = kQueues + (kWarps - kRowWarps) * kQueuePlaces * 8;
  static constexpr uint32_t kTables = kTouched + kWarps * 32 * 4;

  // Beams that a block may hold: of a cluster's, each sends each its share.
  FT_HD static uint32_t beam_places(const SearchBatch& batch) {
    return kBlocks == 1 ? batch.beam_capacity : batch.beam_capacity / kBlocks + kBlocks;
  }
  FT_HD static uint32_t start_places(const SearchBatch& batch) { return beam_places(batch) + kStartsBehind; }
  FT_HD static uint32_t slot_places(const SearchBatch& batch) { return (batch.num_slots + 7) & ~7u; }
  // Of one of the two step tables.
  FT_HD static uint32_t table_bytes(const SearchBatch& batch) {
    return (4u << batch.log2_table) + StepTable::kSlotBytes * slot_places(batch);
  }
  // Beams, their starts of two steps with more behind them, and in a cluster beams that arrive.
  FT_HD static uint32_t frontier_bytes(const SearchBatch& batch) {
    return 16 * beam_places(batch) + 8 * start_places(batch) + (kBlocks == 1 ? 0 : 16 * batch.beam_capacity);
  }
  FT_HD static uint32_t history_bytes(const SearchBatch& batch) {
    return batch.history || batch.max_depth == 0 ? 0 : 4 * (batch.max_depth - 1) * beam_places(batch);
  }
  FT_HD static uint64_t large_bytes(const SearchBatch& batch) {
    return frontier_bytes(batch) + uint64_t(CandidatePool::kEntryBytes) * batch.candidate_places +
           uint64_t(ResultPool::kEntryBytes) * batch.result_places + history_bytes(batch);
  }
};

// First child of the root with a label of at least `place << shift`.
FT_HD uint32_t root_table_entry(const TrieView& trie, uint32_t root_last, int shift, uint32_t place) {
  uint32_t low = 1, high = root_last;
  while (low < high) {
    const uint32_t middle = low + ((high - low) >> 1);
    if (label(trie, middle) >> shift < place)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

}  // namespace flashtrie
