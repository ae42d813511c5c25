// Part of search_group.cuh: what is rare, or called from two places, as functions of their own, on a copy of the state. A member
// function that is not inlined would keep the state in memory for all others too.
#pragma once

namespace flashtrie {

template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void prune_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).prune();
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void put_row_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state, uint32_t row) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).put_row(row);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void find_end_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state, uint32_t row) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).find_end(row);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void check_rows_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).check_rows(state.step_ + 1);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE uint32_t find_beam_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state,
                                       uint32_t group) {
  return GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).find_beam(group);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE uint32_t look_for_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state, uint32_t beam,
                                      uint32_t slot) {
  return GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).look_for(beam, slot);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void raise_floor_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state, int which,
                                     uint32_t share) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).raise_floor(which, share);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE uint64_t pool_cut_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state, int which,
                                      uint32_t n) {
  return GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).pool_cut(which, n);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE uint64_t search_cut_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state, uint32_t n,
                                        int which) {
  return GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).search_cut(which, n);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void write_other_tokens_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state,
                                            uint32_t link, uint32_t depth, uint32_t* to) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).write_other_tokens(link, depth, to);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void gather_crowded_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state,
                                        uint32_t found) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).gather_crowded(found);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void first_round_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).first_round();
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void raise_floors_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).raise_floors();
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void next_round_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).next_round();
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void begin_round_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state, uint32_t step,
                                     bool is_first, uint32_t slot) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).begin_round(step, is_first, slot);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE uint32_t look_further_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state,
                                          uint32_t first_child, uint32_t fan_out, uint32_t slot) {
  return GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).look_further(first_child, fan_out, slot);
}
template <int kBlocks, int kWarps, Mode kMode>
FT_OUTLINE void sort_crowded_outlined(const SearchBatch& batch, unsigned char* shared, const SearchState state,
                                      uint32_t count) {
  GroupSearch<kBlocks, kWarps, kMode>(batch, shared, state).sort_crowded(count);
}

}  // namespace flashtrie
