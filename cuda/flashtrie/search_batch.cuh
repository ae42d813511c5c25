// What the search kernel is given, and how it divides its memory. The Python twin of SearchBatch and of the sizes
// is in flashtrie_cli/engine/cuda_layout.py; a test holds the two together.
#pragma once
#include "pool.cuh"
#include "search.cuh"

namespace flashtrie {

constexpr uint32_t kQueuePlaces = 64;  // matches that wait to be judged, a warp
constexpr uint32_t kRowWarps = 4;      // warps that begin with the next row while the others expand
constexpr uint32_t kMaxExpandWarps = 20;
constexpr uint32_t kMaxRepeats = 64;   // slots with a token that an earlier one has, settled together
constexpr uint32_t kMaxBeamWidth = 4096;
constexpr uint32_t kMaxSlots = 4096;
constexpr uint32_t kNoSlot = 0xffffffffu;

struct SearchBatch {
  TrieView trie;
  SearchParams search;
  const uint32_t* root_table;    // first child of the root with a label >= i << root_shift; null: the root is scanned
  const void* tokens;            // [num_queries, num_steps, num_slots], token_bytes each
  const void* logprobs;          // the same, logprob_bytes each
  const uint32_t* beam_widths;   // by query; null: search.beam_width for all
  const uint32_t* result_limits; // by query; null: search.num_results for all
  const uint32_t* step_counts;   // by query; null: num_steps for all
  uint32_t* counters;            // next query, groups that are done; both 0 before and after
  uint32_t* history;             // history_rows x beam_capacity a group; null: in shared memory
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
  uint32_t scan_limit;           // a larger fan-out is searched once per proposal instead of scanned
  uint32_t num_queries, num_steps, num_slots;
  uint32_t max_depth;            // most tokens of a hit: the trie's depth or num_steps, whichever is less
  uint32_t token_bytes;          // 2, 4 or 8
  uint32_t logprob_bytes;        // 2 or 4
  uint32_t beam_capacity;        // at least every beam width; a multiple of 4, as the next two
  uint32_t result_capacity;      // at least every result limit
  uint32_t candidate_places;     // at least both capacities and 2 kPoolSlack more
  uint32_t result_places;        // at least result_capacity and 2 kPoolSlack more
  int32_t log2_table;            // places of a step table: at least twice num_slots
  uint32_t reserved;
};

// Free places of a pool below which no warp starts another 32 matches: all warps may have begun some.
constexpr uint32_t kPoolSlack = 640;

// State of one block that its threads share.
struct SearchControl {
  uint64_t frontier[2];        // by step parity, the leader's: beams, and their label groups << 32
  uint64_t cut;
  uint32_t again[2];           // by round parity: a pool of the group is full
  uint32_t row_taken[2];       // by parity of the row: slots taken by a warp
  uint32_t num_repeats[2];     // by parity of the row
  uint32_t num_candidates[2];  // by step parity
  uint32_t candidate_floor[2]; // by step parity: a bin below which no candidate can survive, but for later ones
  uint32_t num_results;
  uint32_t result_floor;       // the same for results
  uint32_t num_ties[2];        // the leader's; candidates, results
  uint32_t end_logprobs[4];    // by step: ordered log-prob of the end of sequence, 0 where not proposed
  uint32_t bad_slot;           // complement of the first slot with a NaN or +inf; 0: none
  uint32_t sums[3], sum_turn;
  uint32_t num_gathered;
  uint32_t best_score, worst_score, most_in_bin;  // of the hits; worst as its complement
  uint32_t candidate_totals[kChunks], result_totals[kChunks], warp_sums[kChunks];
  uint32_t repeats[2][kMaxRepeats];
  uint32_t next_query;  // the last, and not cleared between queries
};

// Where the parts of a block's shared memory begin, in bytes. First those of fixed size; then, unless they are in the
// workspace, in this order too, the step tables, the frontier, both pools and the history.
template <int kBlocks>
struct SharedPlaces {
  static constexpr uint32_t kBitmaps = (sizeof(SearchControl) + 15) / 16 * 16;
  static constexpr uint32_t kHistograms = kBitmaps + 2 * kBitmapWords * 4;
  static constexpr uint32_t kTies = kHistograms + (kBlocks == 1 ? 3 : 5) * kBinWords * 4;
  static constexpr uint32_t kQueues = kTies + kMaxTies * 8;
  static constexpr uint32_t kTables = kQueues + kMaxExpandWarps * kQueuePlaces * 8;

  FT_HD static uint32_t table_bytes(const SearchBatch& batch) { return 2 * (12u << batch.log2_table); }
  FT_HD static uint32_t large(const SearchBatch& batch) { return kTables + table_bytes(batch); }
  FT_HD static uint64_t large_bytes(const SearchBatch& batch) {
    const uint64_t rows = batch.history || batch.max_depth == 0 ? 0 : batch.max_depth - 1;
    return 16ull * batch.beam_capacity + uint64_t(kEntryBytes) * (batch.candidate_places + batch.result_places) +
           4 * rows * batch.beam_capacity;
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
