// Threads that copy memory while whoever asked for it goes on: grids on their way to a GPU, answers on theirs to the caller.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

namespace flashtrie {

// Copies for a device come before others. Nothing on the host will read them: small ones go past the processor's caches.
enum class CopyFor { kDevice, kCaller };

// A lock that is held for a few instructions.
class SpinLock {
 public:
  void lock();
  void unlock() { is_held_.clear(std::memory_order_release); }

 private:
  std::atomic_flag is_held_ = ATOMIC_FLAG_INIT;
};

// The threads begin when there is first enough to share, sleep soon after there is nothing more, and end with the pool.
// Several callers may use it at once.
class CopyPool {
  struct Piece {
    unsigned char* to;
    const unsigned char* from;
    size_t num_bytes;
  };

 public:
  // Copies that are waited for together. It stays where it is, as does all memory, from `begin` until `finish` or `drop`;
  // then it is empty, and may be filled again.
  class Job {
   public:
    explicit Job(CopyFor purpose = CopyFor::kDevice) : purpose_(purpose) {}

   private:
    friend class CopyPool;
    const CopyFor purpose_;
    std::vector<Piece> pieces_;
    size_t num_taken_ = 0;             // under the pool's lock
    std::atomic<size_t> num_left_{0};  // not copied yet
    size_t num_bytes_ = 0;
  };

  // `num_threads`: that copy at most, the one that waits among them, `piece_bytes` at a time, which take some 12 us: so long
  // one waits for another. To callers sixteen times as much: a huge page of theirs that is new is one thread's to zero.
  explicit CopyPool(int num_threads, size_t piece_bytes = 128 << 10) : num_threads_(num_threads), piece_bytes_(piece_bytes) {}
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;
  ~CopyPool();

  void add(Job& job, void* to, const void* from, size_t num_bytes) const;

  // In the order in which they are asked for. They may begin at once, or only when they are waited for.
  void begin(Job& job);

  // Copies with the others until all of it has been.
  void finish(Job& job);

  // Gives up what nobody has begun to copy; nothing of it is under way afterwards.
  void drop(Job& job);

 private:
  std::deque<Job*>& queue_of(const Job& job) { return queues_[job.purpose_ == CopyFor::kDevice ? 0 : 1]; }
  bool copy_piece(Job* of);
  void start_threads();
  void serve();
  void leave_to_parent();

  const int num_threads_;
  const size_t piece_bytes_;
  SpinLock lock_;  // of the queues and of what has been taken of a job
  std::deque<Job*> queues_[2];  // jobs of which something is left to take
  std::vector<std::thread> threads_;
  std::atomic<pid_t> process_{0};       // whose threads they are
  std::atomic<uint32_t> num_asked_{0};  // that threads sleep on
  std::atomic<bool> is_ending_{false};
};

}  // namespace flashtrie
