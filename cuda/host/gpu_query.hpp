// One query on a GPU, from host arrays to host arrays, with nothing between them but a launch.
//
// The grid is copied to memory that the kernel reads over the bus, the kernel launched through the driver, and its answer
// taken from mapped memory. A small one is taken word by word as it arrives: every word of it stands at kUnwritten before,
// which no answer holds, so there is no flag to wait for, and no event. A large one is taken when the stream has ended.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace flashtrie {

// The driver's functions, as cuda.h declares them; whoever has the library loaded looks them up.
struct GpuDriver {
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);
  int (*query)(void* stream);
  int (*synchronize)(void* stream);
  int (*record)(void* event, void* stream);
};

constexpr int kGpuNotReady = 600;  // CUDA_ERROR_NOT_READY, of `query`

// What the kernel writes of one query, in mapped memory. The counts are words of their own.
struct GpuAnswer {
  uint32_t *num_hits, *num_tokens, *bad_slot;
  uint32_t *key_ids, *scores, *normalised_scores, *token_ends, *tokens;
};

// How the kernel is launched. It takes one structure by value: a copy for each of the two answers that take turns.
struct GpuLaunch {
  void *function, *stream;
  void* events[2];  // recorded before and behind the kernel; null: none
  unsigned num_blocks, num_threads, shared_bytes;
  size_t tokens_at, logprobs_at;  // where a record says where the grid is
  std::vector<unsigned char> records[2];
};

struct GpuHits {
  uint32_t *key_ids, *scores, *normalised_scores;
  int64_t* token_offsets;
  uint32_t* tokens;
};

struct GpuOutcome {
  uint32_t num_hits, num_tokens;
  uint32_t bad_slot;  // of the first log-prob that is none, ~0 where there is none; then there are no hits
};

class GpuQuery {
 public:
  static constexpr uint32_t kUnwritten = 0xfffffffeu;  // no token, key id, count or slot, and no number as a float

  // `most_hits` and `most_tokens`: what the arrays of the answers hold.
  GpuQuery(const GpuDriver& driver, GpuLaunch launch, void* tokens, size_t token_bytes, void* logprobs,
           size_t logprob_bytes, const GpuAnswer& first, const GpuAnswer& second, uint32_t most_hits, uint32_t most_tokens);

  // Enqueues the search of this grid, which is copied, but where the kernel reaches it by itself; then it must stay as it
  // is. The driver's code, 0 where all is well.
  int start(const void* tokens, const void* logprobs, bool are_mapped);

  // Waits for what was started and copies it out. Throws GpuError where the kernel fails, and whatever `interrupted`,
  // called now and then, throws; nothing is under way afterwards.
  GpuOutcome finish(const GpuHits& to, const std::function<void()>& interrupted);

  size_t token_bytes() const { return token_bytes_; }
  size_t logprob_bytes() const { return logprob_bytes_; }
  uint32_t most_hits() const { return most_hits_; }
  uint32_t most_tokens() const { return most_tokens_; }

 private:
  int launch();
  template <typename Take>
  void take(const uint32_t* from, uint32_t count, const Take& take);
  uint32_t word(const uint32_t* at);
  void wait();
  void wait_for_end();
  void clear(const GpuAnswer& answer, uint32_t num_hits, uint32_t num_tokens);
  void settle();

  GpuDriver driver_;
  GpuLaunch launch_;
  unsigned char *tokens_, *logprobs_;
  size_t token_bytes_, logprob_bytes_;
  GpuAnswer answers_[2];
  uint32_t most_hits_, most_tokens_;
  bool is_watched_;  // an answer's words, as they arrive
  uint32_t used_hits_ = 0, used_tokens_ = 0;  // of the other answer: words to clear
  int turn_ = 0;
  bool is_running_ = false;
  uint32_t spins_ = 0, patience_ = 0;
  const std::function<void()>* interrupted_ = nullptr;
};

// The driver's code for what failed; 0 where the kernel has ended without its answer.
struct GpuError {
  int code;
};

}  // namespace flashtrie
