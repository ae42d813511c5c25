// Part of search_group.cuh: proposal rows, from the grid into their step tables.
#pragma once

namespace flashtrie {

FT_OUTLINE uint32_t load_other_token(const void* tokens, uint32_t token_bytes, uint64_t at) {
  if (token_bytes == 2) return static_cast<const uint16_t*>(tokens)[at];
  // What 32 bits cannot hold is no token; -1 stays the padding that it is.
  const int64_t token = static_cast<const int64_t*>(tokens)[at];
  return token >= -1 && token <= 0xffffffffll ? static_cast<uint32_t>(token) : 0xfffffffeu;
}

// Puts a row into its table, 32 slots a warp at a time, until none are left. The next ones are on their way meanwhile.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::put_row(uint32_t row) {
  const uint64_t first = grid_ + static_cast<uint64_t>(row) * batch_.num_slots;
  auto token_of = [&](uint32_t slot) { return slot < batch_.num_slots ? load_token(first + slot) : kNoToken; };
  auto logprob_of = [&](uint32_t slot) { return slot < batch_.num_slots ? load_logprob(first + slot) : -INFINITY; };
  uint32_t taken = take_slots(row);
  if (taken >= batch_.num_slots) return;
  uint32_t token = token_of(taken + simt::lane()), best = 0;
  float logprob = logprob_of(taken + simt::lane());
#pragma unroll 1
  do {
    const uint32_t next = take_slots(row), slot = taken + simt::lane();
    const uint32_t next_token = token_of(next + simt::lane());
    const float next_logprob = logprob_of(next + simt::lane());
    const uint32_t put = put_slot(row, slot, token, logprob);
    best = put > best ? put : best;
    taken = next;
    token = next_token;
    logprob = next_logprob;
  } while (taken < batch_.num_slots);
  best = simt::reduce_max(best);
  if (simt::lane() == 0) simt::atomic_max(&control().best_logprobs[row & 1], best);
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::take_slots(uint32_t row) {
  uint32_t taken = 0;
  if (simt::lane() == 0) taken = simt::atomic_add(&control().row_taken[row & 1], 32);
  return simt::shuffle(taken, 0);
}

// Looks for the end of sequence in the row behind: what ends at step `row` takes its log-prob from there. Any warps.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::find_end(uint32_t row) {
  if (row + 1 >= num_steps_) return;
  const uint64_t first = grid_ + static_cast<uint64_t>(row + 1) * batch_.num_slots;
  const uint32_t team = kRowWarps * 32, place = simt::thread() - (kWarps * 32 - team);
  if (place >= team) return;
#pragma unroll 1
  for (uint32_t slot = place; slot < batch_.num_slots; slot += team) {
    const uint32_t token = load_token(first + slot);
    if (token != batch_.search.eos) continue;
    const float end = load_logprob(first + slot);
    if (end < INFINITY && slot_ends(batch_.search, token, end))
      simt::atomic_max(&control().end_logprobs[(row + 1) & 3], ordered_score(end));
  }
}

// Makes ready for the row after the next, once this one is done with; by `count` threads, of which this is the one at
// `place`. No barrier inside.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::clear_row(uint32_t row, uint32_t place, uint32_t count) {
  table(row).clear(place, count);
  if (place < kBinWords / 4) reinterpret_cast<simt::Quad*>(candidate_histogram(row + 1))[place] = {0, 0, 0, 0};
  if (deals_directly())  // what the step after the next does not fill stays larger than any
    for (uint32_t i = place; i < Places::start_places(batch_); i += count) beam_starts(row)[i] = kNoSlot;
  if (place == 0) control().row_taken[row & 1] = control().best_logprobs[row & 1] = 0;
}

// The slot's log-prob, ordered; 0 where it extends nothing.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::put_slot(uint32_t row, uint32_t slot, uint32_t token,
                                                                  float logprob) {
  if (!(logprob < INFINITY)) simt::atomic_max(&control().bad_slot, ~(row * batch_.num_slots + slot));
  const bool extends = slot_extends(batch_.trie, batch_.search, token, logprob);
  if (kMode == kPairs && slot < batch_.num_slots) {  // whatever it is, so that the row can be asked by slot
    table(row).tokens[slot] = extends ? token : kNoToken;
    table(row).logprobs[slot] = logprob;
  }
  if (!extends) return 0;
  // The root's children of the first row are looked for next.
  if (row == 0 && batch_.root_table && token >> batch_.root_shift < batch_.root_places)
    simt::prefetch(batch_.root_table + (token >> batch_.root_shift));
  table(row).insert(token, logprob, slot);
  return ordered_score(logprob);
}

// A search that ends early has not seen the last rows; a bad log-prob there is an error all the same.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::check_rows(uint32_t from) {
  if (from >= num_steps_ || simt::rank<kBlocks>() != 0) return;
  const uint64_t end = static_cast<uint64_t>(num_steps_) * batch_.num_slots;
#pragma unroll 1
  for (uint64_t i = static_cast<uint64_t>(from) * batch_.num_slots + simt::thread(); i < end; i += simt::num_threads())
    if (!(load_logprob(grid_ + i) < INFINITY)) simt::atomic_max(&control().bad_slot, ~static_cast<uint32_t>(i));
}

// 16-byte parts of the only query's tokens, which lie in the host's memory, and of both tokens and log-probs.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint64_t GroupSearch<kBlocks, kWarps, kMode>::token_quads() const {
  return (static_cast<uint64_t>(num_steps_) * batch_.num_slots * batch_.token_bytes + 15) / 16;
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint64_t GroupSearch<kBlocks, kWarps, kMode>::grid_quads() const {
  return token_quads() + (static_cast<uint64_t>(num_steps_) * batch_.num_slots * batch_.logprob_bytes + 15) / 16;
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE simt::Quad GroupSearch<kBlocks, kWarps, kMode>::staged_part(uint64_t part) const {
  const uint64_t tokens = token_quads();
  if (part >= grid_quads()) return {};
  return part < tokens ? static_cast<const simt::Quad*>(batch_.tokens)[part] : static_cast<const simt::Quad*>(batch_.logprobs)[part - tokens];
}

// Fetches the only query's grid from the host's memory, all of it at once: one wait for the bus instead of one a row. `first`
// is the thread's first part. Behind a barrier of the group all of it is there.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::stage_rows(simt::Quad first) {
  simt::Quad* to = reinterpret_cast<simt::Quad*>(batch_.stage);
  const uint64_t count = grid_quads();
  uint64_t part = simt::rank<kBlocks>() * kWarps * 32 + simt::thread();
  if (part < count) to[part] = first;
#pragma unroll 1
  while ((part += kBlocks * kWarps * 32) < count) to[part] = staged_part(part);
  tokens_ = to;
  logprobs_ = to + token_quads();
}

// All rows of the query come to the second-level cache while the first ones are worked on.
template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE void GroupSearch<kBlocks, kWarps, kMode>::prefetch_rows() const {
  constexpr uint32_t kSector = 32;  // what one of them brings
  const uint64_t slots = static_cast<uint64_t>(num_steps_) * batch_.num_slots;
  const unsigned char* tokens = static_cast<const unsigned char*>(tokens_) + grid_ * batch_.token_bytes;
  const unsigned char* logprobs = static_cast<const unsigned char*>(logprobs_) + grid_ * batch_.logprob_bytes;
  const uint64_t stride = uint64_t(kSector) * kBlocks * simt::num_threads();
  const uint64_t begin = uint64_t(kSector) * (simt::rank<kBlocks>() * simt::num_threads() + simt::thread());
#pragma unroll 1
  for (uint64_t at = begin; at < slots * batch_.token_bytes; at += stride) simt::prefetch(tokens + at);
#pragma unroll 1
  for (uint64_t at = begin; at < slots * batch_.logprob_bytes; at += stride) simt::prefetch(logprobs + at);
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE uint32_t GroupSearch<kBlocks, kWarps, kMode>::load_token(uint64_t at) const {
  if (batch_.token_bytes == 4) return static_cast<const uint32_t*>(tokens_)[at];
  return load_other_token(tokens_, batch_.token_bytes, at);
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE float GroupSearch<kBlocks, kWarps, kMode>::load_logprob(uint64_t at) const {
  if (batch_.logprob_bytes == 4) return static_cast<const float*>(logprobs_)[at];
  return simt::half_to_float(static_cast<const uint16_t*>(logprobs_)[at]);
}

template <int kBlocks, int kWarps, Mode kMode>
FT_DEVICE StepTable GroupSearch<kBlocks, kWarps, kMode>::table(uint32_t step) const {
  const uint32_t which = step & 1, slots = Places::slot_places(batch_);
  uint32_t* heads = reinterpret_cast<uint32_t*>(tables() + which * Places::table_bytes(batch_));
  uint32_t* tokens = heads + (1u << batch_.log2_table);
  return {bitmaps() + which * kBitmapWords, heads, tokens, reinterpret_cast<float*>(tokens + slots),
          reinterpret_cast<uint16_t*>(tokens + 2 * slots), batch_.log2_table};
}

}  // namespace flashtrie
