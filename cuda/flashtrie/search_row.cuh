// Part of search_group.cuh: proposal rows, from the grid into their step tables.
#pragma once

namespace flashtrie {

// Puts a row into its table, 32 slots a warp at a time, until none are left, and looks for the end of sequence in the row
// behind it, since what ends at step `row` takes its log-prob from there.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::put_row(uint32_t row) {
  const uint64_t first = grid_ + static_cast<uint64_t>(row) * batch_.num_slots;
  const bool ends = batch_.search.eos != kNoToken && row + 1 < num_steps_;
#pragma unroll 1
  for (;;) {
    uint32_t slot = 0;
    if (simt::lane() == 0) slot = simt::atomic_add(&control().row_taken[row & 1], 32);
    slot = simt::shuffle(slot, 0);
    if (slot >= batch_.num_slots) return;
    slot += simt::lane();
    if (slot >= batch_.num_slots) continue;
    const uint64_t at = first + slot;
    const uint32_t token = load_token(at);
    const float logprob = load_logprob(at);
    const uint32_t behind = ends ? load_token(at + batch_.num_slots) : kNoToken;
    if (row > 0 || slot >= simt::num_threads()) put_slot(row, slot, token, logprob);  // else done by begin
    if (ends && behind == batch_.search.eos) {
      const float end = load_logprob(at + batch_.num_slots);
      if (end < INFINITY && slot_ends(batch_.search, behind, end))
        simt::atomic_max(&control().end_logprobs[(row + 1) & 3], ordered_score(end));
    }
  }
}

template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::put_slot(uint32_t row, uint32_t slot, uint32_t token, float logprob) {
  // The root's children of the first row are looked for next.
  if (row == 0 && batch_.root_table && token >> batch_.root_shift < batch_.root_places)
    simt::prefetch(batch_.root_table + (token >> batch_.root_shift));
  if (!(logprob < INFINITY)) {
    simt::atomic_max(&control().bad_slot, ~(row * batch_.num_slots + slot));
  } else if (slot_extends(batch_.trie, batch_.search, token, logprob) && !table(row).insert(token, logprob, slot)) {
    const uint32_t place = simt::atomic_add(&control().num_repeats[row & 1], 1);
    if (place < kMaxRepeats) control().repeats[row & 1][place] = slot;
  }
}

// When a row has been put in and before it is searched: tokens that came twice. Where the list of them is too short, all
// slots are gone through again.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::settle_repeats(uint32_t row) {
  const uint32_t count = control().num_repeats[row & 1];
  if (count == 0) return;
  const bool listed = count <= kMaxRepeats;
#pragma unroll 1
  for (uint32_t i = simt::thread(); i < (listed ? count : batch_.num_slots); i += simt::num_threads()) {
    const uint32_t slot = listed ? control().repeats[row & 1][i] : i;
    const uint64_t at = grid_ + static_cast<uint64_t>(row) * batch_.num_slots + slot;
    const uint32_t token = load_token(at);
    const float logprob = load_logprob(at);
    if (slot_extends(batch_.trie, batch_.search, token, logprob) && logprob < INFINITY)
      table(row).repeat(token, logprob, slot);
  }
}

// A search that ends early has not seen the last rows; a bad log-prob there is an error all the same.
template <int kBlocks, bool kSpill>
FT_DEVICE void GroupSearch<kBlocks, kSpill>::check_rows(uint32_t from) {
  if (from >= num_steps_ || simt::rank<kBlocks>() != 0) return;
  const uint64_t end = static_cast<uint64_t>(num_steps_) * batch_.num_slots;
#pragma unroll 1
  for (uint64_t i = static_cast<uint64_t>(from) * batch_.num_slots + simt::thread(); i < end; i += simt::num_threads())
    if (!(load_logprob(grid_ + i) < INFINITY)) simt::atomic_max(&control().bad_slot, ~static_cast<uint32_t>(i));
}

template <int kBlocks, bool kSpill>
FT_DEVICE uint32_t GroupSearch<kBlocks, kSpill>::load_token(uint64_t at) const {
  if (batch_.token_bytes == 4) return static_cast<const uint32_t*>(batch_.tokens)[at];
  return load_other_token(batch_, at);
}

template <int kBlocks, bool kSpill>
FT_DEVICE float GroupSearch<kBlocks, kSpill>::load_logprob(uint64_t at) const {
  if (batch_.logprob_bytes == 4) return static_cast<const float*>(batch_.logprobs)[at];
  return simt::half_to_float(static_cast<const uint16_t*>(batch_.logprobs)[at]);
}

template <int kBlocks, bool kSpill>
FT_DEVICE StepTable GroupSearch<kBlocks, kSpill>::table(uint32_t step) const {
  const uint32_t which = step & 1, size = 1u << batch_.log2_table;
  unsigned char* at = tables() + which * 12 * size;
  return {bitmaps() + which * kBitmapWords, reinterpret_cast<uint32_t*>(at + 8 * size), reinterpret_cast<uint64_t*>(at),
          batch_.log2_table};
}

}  // namespace flashtrie
