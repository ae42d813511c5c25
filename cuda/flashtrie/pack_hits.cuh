// From answers at fixed strides to flat arrays in query order.
#pragma once
#include "search_batch.cuh"

namespace flashtrie {

// Hits and tokens of the batch so far.
struct HitTotals {
  uint64_t hits, tokens;
};

// Where a chunk of the batch goes. Its offsets go on where those of the chunk before ended.
struct PackedHits {
  int64_t* hit_offsets;      // by query: where its hits end
  uint32_t* key_ids;         // by hit, as the next three
  float* scores;
  float* normalised_scores;
  int64_t* token_offsets;    // where its tokens end
  uint32_t* tokens;
  const HitTotals* begin;    // what the batch had where the arrays begin
  const HitTotals* before;   // and before this chunk
  HitTotals* after;
  HitTotals* told;           // the same as `after`, in the host's memory
  uint32_t* bad_slots;       // by query, in the host's memory: written where there is one
};

constexpr uint32_t kPackedAtOnce = 4;  // words a thread has on their way, so that their reads overlap

// One block a query. Each sums the counts of the queries before it: far less work than their searches were. Such a block
// may have to do with the little room that the next chunk's search leaves it, so it waits for memory four times in all
// where there are up to a hundred hits.
FT_DEVICE void pack_query(const SearchBatch& batch, const PackedHits& to, unsigned char* shared) {
  uint64_t* sums = reinterpret_cast<uint64_t*>(shared);
  const uint32_t query = simt::block(), me = simt::thread(), stride = simt::num_threads();
  if (me < 2) sums[me] = 0;
  simt::sync_block();
  uint64_t hits_before = 0, tokens_before = 0;
#pragma unroll 4
  for (uint32_t q = me; q < query; q += stride) {
    hits_before += batch.num_hits[q];
    tokens_before += batch.num_tokens[q];
  }
  if (me < query) {
    simt::atomic_add(&sums[0], hits_before);
    simt::atomic_add(&sums[1], tokens_before);
  }
  const uint64_t from = static_cast<uint64_t>(query) * batch.result_capacity;
  const uint32_t num_hits = batch.num_hits[query], num_tokens = batch.num_tokens[query];
  const uint32_t* all_tokens = batch.hit_tokens + from * batch.max_depth;
  const HitTotals begin = *to.begin, before = *to.before;
  simt::sync_block();
  const uint64_t hits = before.hits + sums[0], tokens = before.tokens + sums[1];
  const uint64_t first_hit = hits - begin.hits, first_token = tokens - begin.tokens;
  for (uint32_t i = me; i < num_hits; i += stride) {
    const uint32_t key_id = batch.key_ids[from + i], token_end = batch.token_ends[from + i];
    const float score = batch.scores[from + i], normalised_score = batch.normalised_scores[from + i];
    to.key_ids[first_hit + i] = key_id;
    to.scores[first_hit + i] = score;
    to.normalised_scores[first_hit + i] = normalised_score;
    to.token_offsets[first_hit + i] = static_cast<int64_t>(tokens + token_end);
  }
  for (uint32_t i = me; i < num_tokens; i += kPackedAtOnce * stride) {
    uint32_t words[kPackedAtOnce];
#pragma unroll
    for (uint32_t turn = 0; turn < kPackedAtOnce; ++turn)
      words[turn] = i + turn * stride < num_tokens ? all_tokens[i + turn * stride] : 0;
#pragma unroll
    for (uint32_t turn = 0; turn < kPackedAtOnce; ++turn)
      if (i + turn * stride < num_tokens) to.tokens[first_token + i + turn * stride] = words[turn];
  }
  if (me != 0) return;
  const HitTotals after = {hits + num_hits, tokens + num_tokens};
  to.hit_offsets[query] = static_cast<int64_t>(after.hits);
  if (batch.bad_slots[query] != kNoSlot) to.bad_slots[query] = batch.bad_slots[query];
  if (query + 1 < batch.num_queries) return;
  *to.after = after;
  *to.told = after;
}

}  // namespace flashtrie
