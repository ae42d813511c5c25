// From answers at fixed strides to flat arrays in query order.
#pragma once
#include "search_batch.cuh"

namespace flashtrie {

// Hits and tokens of the batch so far.
struct HitTotals {
  uint64_t hits, tokens;
};

struct PackedHits {
  int64_t* hit_offsets;      // of the query before the first, and of the chunk's num_queries
  uint32_t* key_ids;         // by hit, as the next two
  float* scores;
  float* normalised_scores;
  int64_t* token_offsets;    // where the hit before the first ends, and each hit
  uint32_t* tokens;
  const HitTotals* before;   // this chunk; offsets go on from there
  HitTotals* after;
  HitTotals* told;           // the same as `after`, in the host's memory
  uint32_t* bad_slots;       // by query, in the host's memory; written only where there is one
  uint64_t is_whole;         // the arrays are the batch's, not the chunk's
};

// One block a query. Each sums the counts of the queries before it: far less work than their searches were.
FT_DEVICE void pack_query(const SearchBatch& batch, const PackedHits& to, unsigned char* shared) {
  uint64_t* sums = reinterpret_cast<uint64_t*>(shared);
  const uint32_t query = simt::block(), me = simt::thread();
  if (me < 2) sums[me] = 0;
  simt::sync_block();
  uint64_t hits_before = 0, tokens_before = 0;
  for (uint32_t q = me; q < query; q += simt::num_threads()) {
    hits_before += batch.num_hits[q];
    tokens_before += batch.num_tokens[q];
  }
  if (me < query) {
    simt::atomic_add(&sums[0], hits_before);
    simt::atomic_add(&sums[1], tokens_before);
  }
  simt::sync_block();
  const HitTotals before = *to.before;
  const uint64_t token_total = before.tokens + sums[1], first_hit = sums[0] + (to.is_whole ? before.hits : 0);
  const uint64_t first_token = sums[1] + (to.is_whole ? before.tokens : 0);
  const uint64_t from = static_cast<uint64_t>(query) * batch.result_capacity;
  const uint32_t num_hits = batch.num_hits[query], num_tokens = batch.num_tokens[query];
  for (uint32_t i = me; i < num_hits; i += simt::num_threads()) {
    to.key_ids[first_hit + i] = batch.key_ids[from + i];
    to.scores[first_hit + i] = batch.scores[from + i];
    to.normalised_scores[first_hit + i] = batch.normalised_scores[from + i];
    to.token_offsets[first_hit + i + 1] = static_cast<int64_t>(token_total + batch.token_ends[from + i]);
  }
  const uint32_t* tokens = batch.hit_tokens + from * batch.max_depth;
  for (uint32_t i = me; i < num_tokens; i += simt::num_threads()) to.tokens[first_token + i] = tokens[i];
  if (me != 0) return;
  to.hit_offsets[query + 1] = static_cast<int64_t>(before.hits + sums[0] + num_hits);
  if (batch.bad_slots[query] != kNoSlot) to.bad_slots[query] = batch.bad_slots[query];
  if (query + 1 < batch.num_queries) return;
  const HitTotals after = {before.hits + sums[0] + num_hits, token_total + num_tokens};
  *to.after = after;
  *to.told = after;
}

}  // namespace flashtrie
