// The FlashTrie paper's search (2.2, algorithms 1, 3, 4, 5) and its ablations (4.6, I, J), for the benchmark; exact
// under the same contract as the engines. One cooperative launch: a group of blocks a query, a block a beam, 512 threads
// over the proposals, an append-only candidate buffer, block merge sort and a tournament of merges, barriers between.
//
// What it reads a step: per beam the line and two or three louds words, then per (beam, proposal) log2(fan-out)
// dependent label reads (plus flag, line and high part where labels are wide); per candidate one line. So B x K lookups,
// whatever the trie holds. Per group, (2 + log2(candidates / 2B)) barriers of about 1.2 us.
#include <cooperative_groups.h>

#include <cub/block/block_scan.cuh>

#include "flashtrie/paper_select.cuh"

namespace flashtrie {
namespace {

namespace cg = cooperative_groups;

enum class Inner { kBinary, kLinearProbe, kTwoPointer, kPerChild, kHash, kPositionTokens };

constexpr int kThreads = kPaperThreads;
constexpr uint32_t kLinkSlotBits = 12;
constexpr int kRangesAhead = 64;   // beams of a block whose child ranges are found together
constexpr int kProbeLabels = 2048;  // labels that linear-probe decodes at a time
static_assert(kPaperMaxSlots == 1u << kLinkSlotBits, "a slot fits its link");

#if defined(FT_EMULATION)  // the tests', without a GPU
__align__(16) unsigned char shared_memory[1 << 18];
#else
extern __shared__ __align__(16) unsigned char shared_memory[];
#endif

using Scan = cub::BlockScan<uint32_t, kThreads>;

// D.2: position of the next zero of louds at or behind bit `at`; all lanes of a warp call it alike.
__device__ uint64_t warp_next_unset(const uint64_t* louds, uint64_t num_words, uint64_t at) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  uint64_t word = at >> 6;
  const uint64_t first = ~louds[word] & (~uint64_t(0) << (at & 63));
  if (first != 0) return (word << 6) + lowest_one64(first);
  for (++word;; word += 32) {
    const unsigned ballot = __ballot_sync(0xffffffffu, word + lane < num_words && ~louds[word + lane] != 0);
    if (ballot != 0) {
      word += __ffs(static_cast<int>(ballot)) - 1;
      return (word << 6) + lowest_one64(~louds[word]);
    }
  }
}

template <Inner kInner>
class PaperSearch {
 public:
  __device__ PaperSearch(const PaperBatch& batch)
      : batch_(batch),
        trie_(batch.trie),
        params_(batch.search),
        group_(blockIdx.x / batch.blocks_per_group),
        rank_(blockIdx.x % batch.blocks_per_group),
        is_timed_(group_ == 0 && rank_ == 0 && threadIdx.x == 0) {
    const PaperLayout at = paper_layout(params_.beam_width, params_.num_results, batch.num_steps, batch.num_slots,
                                        batch.candidate_capacity, batch.result_capacity);
    uint8_t* base = batch.workspace + group_ * batch.workspace_bytes;
    candidate_keys_ = reinterpret_cast<uint64_t*>(base + at.candidate_keys);
    candidate_links_ = reinterpret_cast<uint32_t*>(base + at.candidate_links);
    result_keys_ = reinterpret_cast<uint64_t*>(base + at.result_keys);
    result_links_ = reinterpret_cast<uint32_t*>(base + at.result_links);
    result_scores_ = reinterpret_cast<float*>(base + at.result_scores);
    result_steps_ = base + at.result_steps;
    run_keys_ = reinterpret_cast<uint64_t*>(base + at.run_keys);
    run_values_ = reinterpret_cast<uint32_t*>(base + at.run_values);
    nodes_ = reinterpret_cast<uint32_t*>(base + at.nodes);
    scores_ = reinterpret_cast<float*>(base + at.scores);
    history_ = reinterpret_cast<uint32_t*>(base + at.history);
    row_tokens_ = reinterpret_cast<uint32_t*>(base + at.row_tokens);
    row_logprobs_ = reinterpret_cast<float*>(base + at.row_logprobs);
    row_flags_ = base + at.row_flags;
    row_counts_ = reinterpret_cast<uint32_t*>(base + at.row_counts);
    ends_ = reinterpret_cast<uint2*>(base + at.ends);
    counts_ = reinterpret_cast<uint32_t*>(base + at.counts);
    tokens_ = reinterpret_cast<uint32_t*>(shared_memory);
    logprobs_ = reinterpret_cast<float*>(tokens_ + batch.num_slots);
    sort_memory_ = shared_memory + (8 * batch.num_slots + 15) / 16 * 16;
  }

  __device__ void run() {
    if (group_ >= batch_.num_groups) return;
    for (uint64_t query = group_; query < batch_.num_queries; query += batch_.num_groups) search(query);
    if (is_timed_)
      for (int phase = 0; phase < kPaperPhases; ++phase) batch_.phases[phase] += cycles_[phase];
  }

 private:
  enum Phase { kExpansion, kValidation, kPruning, kWaiting };

  __device__ void search(uint64_t query) {
    mark_ = clock64();
    prepare(query);
    uint32_t num_beams = 1;
    for (step_ = 0; step_ < batch_.num_steps && num_beams > 0; ++step_) {
      expand(num_beams);
      barrier();
      // Two counters take turns, so that one can be cleared while the other is read.
      const uint32_t count = load_acquire(counts_ + (step_ & 1));
      const uint32_t kept = select(candidate_keys_, candidate_links_, count, params_.beam_width);
      if (rank_ == 0) write_frontier(kept);
      add(kPruning);
      barrier();
      num_beams = kept;
    }
    const uint32_t found = load_acquire(counts_ + 2);
    const uint32_t kept = select(result_keys_, nullptr, found, params_.num_results);
    if (rank_ == 0) write_answer(query, kept);
    add(kPruning);
    barrier();  // the next query of this group reuses everything
  }

  __device__ uint32_t select(const uint64_t* keys, const uint32_t* values, uint32_t count, uint32_t width) {
    const PaperRuns runs{run_keys_, run_values_, rank_, batch_.blocks_per_group, sort_memory_};
    return runs.select(keys, values, count, width, [this] {
      add(kPruning);
      barrier();
    });
  }

  // The grid barrier of cooperative groups, over one group: the top bit turns when all have come. Needs no reset.
  __device__ void barrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t* arrived = batch_.barriers + group_ * 32;  // a line of its own
      const uint32_t step = rank_ == 0 ? 0x80000000u - (batch_.blocks_per_group - 1) : 1;
      __threadfence();
      const uint32_t old = atomicAdd(arrived, step);
      while (((old ^ load_acquire(arrived)) & 0x80000000u) == 0) {
      }
      __threadfence();
    }
    __syncthreads();
    add(kWaiting);
  }

  __device__ void add(Phase phase) {
    if (!is_timed_) return;
    const long long now = clock64();
    cycles_[phase] += static_cast<uint64_t>(now - mark_);
    mark_ = now;
  }

  // Once a query: each row by ascending token, each token once with its best log-prob; a block a row.
  __device__ void prepare(uint64_t query) {
    for (uint32_t row = rank_; row < batch_.num_steps; row += batch_.blocks_per_group) {
      if (batch_.num_slots <= 512)
        prepare_row<1>(query, row);
      else if (batch_.num_slots <= 1024)
        prepare_row<2>(query, row);
      else
        prepare_row<8>(query, row);
    }
    if (rank_ == 0 && threadIdx.x == 0) {
      counts_[0] = counts_[1] = counts_[2] = 0;
      nodes_[0] = 0;
      scores_[0] = 0.0f;
    }
    add(kExpansion);
    barrier();
  }

  template <int kItems>
  __device__ void prepare_row(uint64_t query, uint32_t row) {
    const uint64_t begin = (query * batch_.num_steps + row) * batch_.num_slots;
    __shared__ uint32_t end_score, end_seen;
    __shared__ typename Scan::TempStorage scan;
    if (threadIdx.x == 0) end_score = end_seen = 0;
    __syncthreads();
    uint64_t keys[kItems];
    uint32_t values[kItems];
    for (int i = 0; i < kItems; ++i) {
      const uint32_t slot = threadIdx.x * kItems + i;
      keys[i] = values[i] = 0;
      if (slot >= batch_.num_slots) continue;
      const uint32_t token = batch_.tokens[begin + slot];
      const float logprob = batch_.logprobs[begin + slot];
      if (slot_ends(params_, token, logprob)) {
        atomicMax(&end_score, ordered_score(logprob));
        end_seen = 1;
      }
      // Descending, so the complement of the token; 0 is no slot, since the score of one is never 0 in order.
      if (slot_extends(trie_, params_, token, logprob)) keys[i] = uint64_t(~token) << 32 | ordered_score(logprob);
    }
    auto& storage = *reinterpret_cast<typename PaperSort<kItems>::TempStorage*>(sort_memory_);
    PaperSort<kItems>(storage).Sort(keys, values, Descending());
    __syncthreads();
    uint32_t* edges = reinterpret_cast<uint32_t*>(sort_memory_);  // the last token of each thread
    edges[threadIdx.x] = static_cast<uint32_t>(keys[kItems - 1] >> 32);
    __syncthreads();
    uint32_t kept[kItems], places[kItems], flags[kItems], total;
    for (int i = 0; i < kItems; ++i) {
      const uint32_t high = static_cast<uint32_t>(keys[i] >> 32);
      const bool is_first = i > 0                ? high != static_cast<uint32_t>(keys[i > 0 ? i - 1 : 0] >> 32)
                            : threadIdx.x == 0 ? true
                                               : high != edges[threadIdx.x - 1];
      flags[i] = 3;
      kept[i] = keys[i] != 0 && is_first;
      if (kInner == Inner::kPositionTokens && kept[i]) kept[i] = flags[i] = position_flags(row, ~high);
      places[i] = kept[i] = kept[i] != 0;
    }
    Scan(scan).ExclusiveSum(places, places, total);
    const uint64_t to = uint64_t(row) * batch_.num_slots;
    for (int i = 0; i < kItems; ++i) {
      if (!kept[i]) continue;
      row_tokens_[to + places[i]] = ~static_cast<uint32_t>(keys[i] >> 32);
      row_logprobs_[to + places[i]] = score_of(static_cast<uint32_t>(keys[i]));
      row_flags_[to + places[i]] = static_cast<uint8_t>(flags[i]);
    }
    if (threadIdx.x == 0) {
      row_counts_[row] = total;
      ends_[row] = make_uint2(end_seen, end_score);
    }
    __syncthreads();
  }

  // Appendix I: what the keys say of a token at this depth, whatever came before it. 0 where no key has it.
  __device__ uint32_t position_flags(uint32_t depth, uint32_t token) const {
    uint32_t low = batch_.valid_offsets[depth], high = batch_.valid_offsets[depth + 1];
    const uint32_t end = high;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (batch_.valid_tokens[middle] < token)
        low = middle + 1;
      else
        high = middle;
    }
    return low < end && batch_.valid_tokens[low] == token ? batch_.valid_flags[low] : 0;
  }

  __device__ void expand(uint32_t num_beams) {
    __shared__ ChildRange ranges[kRangesAhead];
    num_proposals_ = row_counts_[step_];
    const uint64_t row = uint64_t(step_) * batch_.num_slots;
    for (uint32_t slot = threadIdx.x; slot < num_proposals_; slot += kThreads) {
      tokens_[slot] = row_tokens_[row + slot];
      logprobs_[slot] = row_logprobs_[row + slot];
    }
    find_end();
    for (uint32_t begin = rank_; begin < num_beams; begin += batch_.blocks_per_group * kRangesAhead) {
      if (kInner != Inner::kPositionTokens && kInner != Inner::kHash) {
        for (uint32_t at = threadIdx.x / 32; at < kRangesAhead; at += kThreads / 32) {
          const uint32_t beam = begin + at * batch_.blocks_per_group;
          if (beam >= num_beams) break;
          const ChildRange range = warp_child_range(nodes_[beam]);
          if ((threadIdx.x & 31) == 0) ranges[at] = range;
        }
      }
      __syncthreads();
      add(kExpansion);
      for (int at = 0; at < kRangesAhead; ++at) {
        const uint32_t beam = begin + at * batch_.blocks_per_group;
        if (beam >= num_beams) break;
        validate(beam, nodes_[beam], scores_[beam], ranges[at]);
      }
      add(kValidation);
      __syncthreads();
    }
  }

  __device__ void find_end() {
    can_end_ = true;
    end_logprob_ = 0.0f;
    if (params_.eos == kNoToken) return;
    can_end_ = step_ + 1 < batch_.num_steps;
    if (!can_end_) return;
    const uint2 end = ends_[step_ + 1];
    can_end_ = end.x != 0;
    end_logprob_ = can_end_ ? score_of(end.y) : 0.0f;
  }

  __device__ ChildRange warp_child_range(uint32_t node) const {
    const NodeLine line = trie_.lines[node >> 6];
    const int skip = static_cast<int>(node & 63);
    if (line.wide != kNotWide) {
      const uint32_t* row = trie_.wide + static_cast<uint64_t>(line.wide) * kWideStride + skip;
      return {row[0], row[1]};
    }
    uint64_t start = static_cast<uint64_t>(node - skip) + line.first_child - 1;
    if (skip > 0) start = select_zero(start, skip) + 1;
    const uint64_t end = warp_next_unset(trie_.louds, (2 * uint64_t(trie_.num_nodes) + 62) / 64, start);
    const uint32_t first = static_cast<uint32_t>(start - node) + 1;
    return {first, first + static_cast<uint32_t>(end - start)};
  }

  // The `count`-th zero (from 1) at or behind a position; at most nine words on.
  __device__ uint64_t select_zero(uint64_t at, int count) const {
    uint64_t word = at >> 6;
    uint64_t zeros = ~trie_.louds[word] & (~uint64_t(0) << (at & 63));
    for (int here; (here = popcount64(zeros)) < count; count -= here) zeros = ~trie_.louds[++word];
    return (word << 6) + select_one64(zeros, count - 1);
  }

  __device__ void validate(uint32_t beam, uint32_t node, float score, ChildRange range) {
    if constexpr (kInner == Inner::kBinary) {
      if (range.fan_out() == 0) return;
      for (uint32_t slot = threadIdx.x; slot < num_proposals_; slot += kThreads) {
        if (!passes(score, slot)) continue;
        const uint32_t child = find_child(trie_, range, tokens_[slot]);
        if (child != kNoNode) append(beam, slot, child, score + logprobs_[slot]);
      }
    } else if constexpr (kInner == Inner::kHash) {
      for (uint32_t slot = threadIdx.x; slot < num_proposals_; slot += kThreads) {
        if (!passes(score, slot)) continue;
        const uint32_t child = find_transition(uint64_t(node) << 32 | tokens_[slot]);
        if (child != kNoNode) append(beam, slot, child, score + logprobs_[slot]);
      }
    } else if constexpr (kInner == Inner::kPositionTokens) {
      for (uint32_t slot = threadIdx.x; slot < num_proposals_; slot += kThreads)
        if (passes(score, slot)) append(beam, slot, beam << kLinkSlotBits | slot, score + logprobs_[slot]);
    } else if constexpr (kInner == Inner::kPerChild) {
      for (uint32_t child = range.first + threadIdx.x; child < range.last; child += kThreads) {
        const uint32_t wanted = label(trie_, child);
        uint32_t slot = 0;
        while (slot < num_proposals_ && tokens_[slot] < wanted) ++slot;
        if (slot < num_proposals_ && tokens_[slot] == wanted && passes(score, slot))
          append(beam, slot, child, score + logprobs_[slot]);
      }
    } else if constexpr (kInner == Inner::kTwoPointer) {
      if (threadIdx.x != 0) return;
      uint32_t slot = 0;
      for (uint32_t child = range.first; child < range.last && slot < num_proposals_; ++child) {
        const uint32_t wanted = label(trie_, child);
        while (slot < num_proposals_ && tokens_[slot] < wanted) ++slot;
        if (slot < num_proposals_ && tokens_[slot] == wanted && passes(score, slot))
          append(beam, slot, child, score + logprobs_[slot]);
      }
    } else {
      probe_linearly(beam, score, range);
    }
  }

  // The children's labels are decoded once for the block, then every thread scans them for its proposals.
  __device__ void probe_linearly(uint32_t beam, float score, ChildRange range) {
    uint32_t* labels = reinterpret_cast<uint32_t*>(sort_memory_);
    for (uint32_t begin = range.first; begin < range.last; begin += kProbeLabels) {
      const uint32_t count = min(range.last - begin, static_cast<uint32_t>(kProbeLabels));
      for (uint32_t i = threadIdx.x; i < count; i += kThreads) labels[i] = label(trie_, begin + i);
      __syncthreads();
      for (uint32_t slot = threadIdx.x; slot < num_proposals_; slot += kThreads) {
        const uint32_t wanted = tokens_[slot];
        uint32_t i = 0;
        while (i < count && labels[i] < wanted) ++i;
        if (i < count && labels[i] == wanted && passes(score, slot)) append(beam, slot, begin + i, score + logprobs_[slot]);
      }
      __syncthreads();
    }
  }

  __device__ uint32_t find_transition(uint64_t key) const {
    const uint64_t mask = (uint64_t(1) << batch_.log2_hash) - 1;
    for (uint64_t at = transition_hash(key, batch_.log2_hash);; at = (at + 1) & mask) {
      const uint64_t here = batch_.hash_keys[at];
      if (here == key) return batch_.hash_children[at];
      if (here == ~uint64_t(0)) return kNoNode;
    }
  }

  __device__ bool passes(float score, uint32_t slot) const {
    return score + logprobs_[slot] > params_.sequence_threshold;
  }

  __device__ void append(uint32_t beam, uint32_t slot, uint32_t child, float score) {
    const uint32_t link = beam << kLinkSlotBits | slot;
    bool ends, goes_on;
    if constexpr (kInner == Inner::kPositionTokens) {
      const uint32_t flags = row_flags_[uint64_t(step_) * batch_.num_slots + slot];
      ends = flags & 1, goes_on = flags & 2;
    } else {
      const NodeLine& line = trie_.lines[child >> 6];
      ends = (line.terminal >> (child & 63)) & 1;
      goes_on = !((line.leaf >> (child & 63)) & 1);
    }
    if (goes_on) {
      const uint32_t at = claim(counts_ + (step_ & 1));
      candidate_keys_[at] = rank_key(score, child);
      candidate_links_[at] = link;
    }
    if (ends && can_end_) {
      const float total = params_.eos == kNoToken ? score : score + end_logprob_;
      const uint32_t at = claim(counts_ + 2);
      result_keys_[at] = rank_key(total * params_.length_factors[step_ + 1], child);
      result_links_[at] = link;
      result_scores_[at] = total;
      result_steps_[at] = static_cast<uint8_t>(step_);
    }
  }

  // A place of its own in an append-only buffer, one atomic a converged warp.
  __device__ static uint32_t claim(uint32_t* count) {
    const cg::coalesced_group active = cg::coalesced_threads();
    uint32_t first = 0;
    if (active.thread_rank() == 0) first = atomicAdd(count, active.size());
    return active.shfl(first, 0) + active.thread_rank();
  }

  __device__ void write_frontier(uint32_t kept) {
    const uint64_t row = uint64_t(step_) * params_.beam_width;
    for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
      nodes_[i] = key_node(run_keys_[i]);
      scores_[i] = key_score(run_keys_[i]);
      history_[row + i] = run_values_[i];
    }
    if (threadIdx.x == 0) counts_[(step_ + 1) & 1] = 0;
  }

  __device__ void write_answer(uint64_t query, uint32_t kept) {
    __shared__ typename Scan::TempStorage scan;
    constexpr int kItems = kPaperMaxWidth / kThreads;
    uint32_t depths[kItems], ends[kItems], total;
    for (int i = 0; i < kItems; ++i) {
      const uint32_t rank = threadIdx.x * kItems + i;
      depths[i] = rank < kept ? result_steps_[run_values_[rank]] + 1u : 0;
    }
    Scan(scan).ExclusiveSum(depths, ends, total);
    const uint64_t hits = query * params_.num_results;
    uint32_t* tokens = batch_.hit_tokens + hits * batch_.num_steps;
    for (int i = 0; i < kItems; ++i) {
      const uint32_t rank = threadIdx.x * kItems + i;
      if (rank >= kept) break;
      const uint32_t place = run_values_[rank];
      batch_.key_ids[hits + rank] = kInner == Inner::kPositionTokens ? kNoNode : key_id(trie_, key_node(run_keys_[rank]));
      batch_.scores[hits + rank] = result_scores_[place];
      batch_.normalised_scores[hits + rank] = key_score(run_keys_[rank]);
      batch_.depths[hits + rank] = depths[i];
      backtrace(result_links_[place], depths[i], tokens + ends[i]);
    }
    if (threadIdx.x == 0) {
      batch_.num_hits[query] = kept;
      batch_.num_tokens[query] = total;
    }
  }

  __device__ void backtrace(uint32_t link, uint32_t depth, uint32_t* to) const {
    for (uint32_t step = depth; step-- > 0;) {
      to[step] = row_tokens_[uint64_t(step) * batch_.num_slots + (link & (kPaperMaxSlots - 1))];
      if (step > 0) link = history_[uint64_t(step - 1) * params_.beam_width + (link >> kLinkSlotBits)];
    }
  }

  const PaperBatch& batch_;
  const TrieView& trie_;
  const SearchParams& params_;
  const uint32_t group_, rank_;
  const bool is_timed_;
  uint64_t *candidate_keys_, *result_keys_, *run_keys_;
  uint32_t *candidate_links_, *result_links_, *run_values_, *nodes_, *history_, *row_tokens_, *row_counts_, *counts_;
  float *result_scores_, *scores_, *row_logprobs_;
  uint8_t *result_steps_, *row_flags_;
  uint2* ends_;
  uint32_t* tokens_;
  float* logprobs_;
  unsigned char* sort_memory_;
  uint32_t step_ = 0, num_proposals_ = 0;
  bool can_end_ = true;
  float end_logprob_ = 0;
  long long mark_ = 0;
  uint64_t cycles_[kPaperPhases] = {};
};

}  // namespace
}  // namespace flashtrie

using namespace flashtrie;

#define FT_PAPER_KERNEL(name, inner)                                                                             \
  extern "C" __global__ void __launch_bounds__(kPaperThreads, 2) name(const __grid_constant__ PaperBatch batch) { \
    PaperSearch<Inner::inner>(batch).run();                                                                      \
  }

FT_PAPER_KERNEL(flashtrie_paper, kBinary)
FT_PAPER_KERNEL(linear_probe, kLinearProbe)
FT_PAPER_KERNEL(two_pointer, kTwoPointer)
FT_PAPER_KERNEL(per_child, kPerChild)
FT_PAPER_KERNEL(hash_transitions, kHash)
FT_PAPER_KERNEL(ppt, kPositionTokens)

// Fills the table of transitions, empty before; a warp a node.
extern "C" __global__ void build_transitions(TrieView trie, uint64_t* keys, uint32_t* children, int log2_size) {
  const uint64_t mask = (uint64_t(1) << log2_size) - 1;
  const uint64_t num_warps = uint64_t(gridDim.x) * blockDim.x / 32;
  for (uint64_t node = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32; node < trie.num_nodes; node += num_warps) {
    const ChildRange range = child_range(trie, static_cast<uint32_t>(node));
    for (uint32_t child = range.first + (threadIdx.x & 31); child < range.last; child += 32) {
      const uint64_t key = node << 32 | label(trie, child);
      uint64_t at = transition_hash(key, log2_size);
      while (atomicCAS(reinterpret_cast<unsigned long long*>(keys + at), ~0ull, key) != ~0ull) at = (at + 1) & mask;
      children[at] = child;
    }
  }
}
