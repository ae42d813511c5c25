// Batches of queries on a GPU, from host arrays to host arrays: chunks follow one another on lanes, so that copies and
// kernels overlap, and everything is asked of the driver from here, a microsecond a call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "copy_pool.hpp"

namespace flashtrie {

// The driver's functions, as cuda.h declares them; whoever has the library loaded looks them up.
struct GpuBatchDriver {
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);
  int (*record)(void* event, void* stream);
  int (*query_event)(void* event);
  int (*wait_event)(void* stream, void* event, unsigned flags);
  int (*upload)(uint64_t to, const void* from, size_t num_bytes, void* stream);
  int (*download)(void* to, uint64_t from, size_t num_bytes, void* stream);
  int (*synchronize)(void* stream);
};

// Where an answer lies, on the device or in pinned memory: the arrays of PackedHits.
struct GpuPlaces {
  uint64_t hit_offsets, key_ids, scores, normalised_scores, token_offsets, tokens;
};

// The buffers of the chunk that is under way on a lane. Grids come and are searched on one stream; answers are packed and
// go on another, of a higher priority, so that packing gets the first place that a search leaves.
struct GpuLane {
  void *search_stream, *pack_stream;
  void *uploaded, *searched, *packed, *fetched;  // events
  uint64_t tokens, logprobs;             // of the chunk, on the device
  GpuPlaces places;                      // packed, on the device
  uint64_t* told;                        // hits and tokens of the batch so far, in pinned memory
  uint32_t* bad_slots;                   // by query, all ones where there is none; in pinned memory
  unsigned char *staged_tokens = nullptr, *staged_logprobs = nullptr;
};

// A part of a batch, and how its search is launched. `record`: the kernels' SearchBatch.
struct GpuChunk {
  uint32_t num_queries;
  void* function;
  unsigned num_blocks, num_threads, shared_bytes;
  bool is_direct;  // packed straight to its places in the answer
  std::vector<unsigned char> record;
};

struct GpuBatchOutcome {
  uint64_t num_hits, num_tokens;
  uint64_t bad_query;  // of a bad log-prob
  uint32_t bad_slot;   // and where in its grid; ~0 where there is none. Where there is one, nothing else holds
};

struct GpuBatchShape {
  uint32_t lane_queries;                 // that a lane has room for
  size_t token_bytes, logprob_bytes;     // of a query's grid
  // Uploads on several streams overtake each other. From so many bytes a chunk on all go by this stream, in order.
  size_t ordered_bytes;
  void* upload_stream;
  uint64_t zeros, totals[2];             // on the device, two words each: zeros, and hits and tokens so far, in turns
  void* pack;                            // the kernel
  void* events[2];                       // recorded around the kernels of a batch; null: none
};

class GpuBatch {
 public:
  // `copies` makes the copies on the host, and outlives this.
  GpuBatch(const GpuBatchDriver& driver, const GpuBatchShape& shape, std::vector<GpuLane> lanes, CopyPool& copies)
      : driver_(driver), shape_(shape), lanes_(std::move(lanes)), copies_(copies), staging_(lanes_.size()) {}
  GpuBatch(const GpuBatch&) = delete;
  GpuBatch& operator=(const GpuBatch&) = delete;
  ~GpuBatch() { drop_copies(); }

  // Pinned memory of each lane, for grids that are not in such memory.
  void stage(size_t lane, unsigned char* tokens, unsigned char* logprobs);

  // Begins the search of all grids, which must stay as they are until `finish` has returned; `chunks`, too. Throws GpuError
  // where something fails; nothing is under way then.
  void start(const std::vector<GpuChunk>& chunks, const unsigned char* tokens, const unsigned char* logprobs, bool are_pinned);

  // The rest of it. Brings the answer to `to`, in pinned memory, and from there to `kept`, if any. Throws GpuError, and
  // whatever `interrupted`, called now and then, throws; nothing is under way afterwards.
  GpuBatchOutcome finish(const GpuPlaces& to, const GpuPlaces* kept, const std::function<void()>& interrupted);

  // Until nothing is under way, and none of it matters any more.
  void stop();

  const GpuBatchShape& shape() const { return shape_; }
  size_t num_lanes() const { return lanes_.size(); }

 private:
  // What of the answer is a chunk's.
  struct Share {
    uint64_t first_hit, num_hits, first_token, num_tokens;
  };

  const GpuLane& lane(size_t chunk) const { return lanes_[chunk % lanes_.size()]; }
  bool comes_after(size_t chunk) const { return chunk >= lanes_.size(); }
  void stage_ahead();
  void search(size_t chunk, const std::function<void()>& interrupted);
  void pack(size_t chunk, const GpuPlaces* to);
  bool deliver(size_t chunk, const std::function<void()>& interrupted);
  void fetch(uint64_t to, uint64_t from, size_t num_bytes, const GpuLane& on);
  void keep_ahead();
  void keep(size_t chunk);
  void wait(void* event, const std::function<void()>& interrupted);
  void drop_copies();

  GpuBatchDriver driver_;
  GpuBatchShape shape_;
  std::vector<GpuLane> lanes_;
  CopyPool& copies_;
  std::vector<CopyPool::Job> staging_;  // by lane
  std::deque<CopyPool::Job> keeping_;   // by chunk, as they come

  // Of the batch that is under way.
  const std::vector<GpuChunk>* chunks_ = nullptr;
  const unsigned char *tokens_ = nullptr, *logprobs_ = nullptr;
  bool are_pinned_ = false, keeps_order_ = false;
  std::vector<uint64_t> begins_;  // by chunk: its first query
  const GpuPlaces *to_ = nullptr, *kept_ = nullptr;  // of the answer, once they are known
  std::vector<Share> shares_;     // by chunk, of those that were delivered
  // Chunks of which that has been asked.
  size_t num_staged_ = 0, num_searched_ = 0, num_packed_ = 0, num_kept_ = 0;
  GpuBatchOutcome outcome_{};
  uint32_t patience_ = 0;
};

}  // namespace flashtrie
