#include "copy_pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <system_error>

#include "pause.hpp"

namespace flashtrie {
namespace {

constexpr size_t kAlone = 2;          // pieces for a device that are copied before a thread has woken
constexpr size_t kCallersPiece = 16;  // times as much; 2 MiB, a huge page
constexpr int kSpins = 1 << 11;       // before a thread sleeps: some 100 us
constexpr size_t kLine = 64;

// The bus is slow to fetch what lies in a core's own caches. So much leaves them before it is fetched, for the cache that all
// cores share, and past that one the memory would be what binds (docs/benchmarks/gpu_search.md).
constexpr size_t kLarge = 4 << 20;

#if defined(__x86_64__)
// Four parts at once, each of which the processor fetches ahead: a third more than one from its beginning to its end.
void copy_past_caches(unsigned char* to, const unsigned char* from, size_t num_bytes) {
  constexpr size_t kPairs = 4, kAhead = 4 * kLine;
  const size_t part = num_bytes / kPairs / kLine * kLine;
  for (size_t at = 0; at < part; at += kLine)
    for (size_t i = 0; i < kPairs; ++i) {
      const auto* source = reinterpret_cast<const __m128i*>(from + i * part + at);
      auto* target = reinterpret_cast<__m128i*>(to + i * part + at);
      __builtin_prefetch(from + i * part + at + kAhead);
      __m128i words[kLine / 16];
      for (size_t k = 0; k < kLine / 16; ++k) words[k] = _mm_loadu_si128(source + k);
      for (size_t k = 0; k < kLine / 16; ++k) _mm_stream_si128(target + k, words[k]);
    }
  std::memcpy(to + kPairs * part, from + kPairs * part, num_bytes - kPairs * part);
  _mm_sfence();
}
#endif

void copy(unsigned char* to, const unsigned char* from, size_t num_bytes, [[maybe_unused]] bool is_past_caches) {
#if defined(__x86_64__)
  if (is_past_caches && reinterpret_cast<uintptr_t>(to) % 16 == 0) return copy_past_caches(to, from, num_bytes);
#endif
  std::memcpy(to, from, num_bytes);
}

// A moment; a longer one where whoever is waited for seems not to run.
void wait_a_moment(int& spins) {
  if (++spins < kSpins) {
    pause();
  } else {
    std::this_thread::yield();
  }
}

}  // namespace

void SpinLock::lock() {
  for (int spins = 0; is_held_.test_and_set(std::memory_order_acquire);) wait_a_moment(spins);
}

void CopyPool::add(Job& job, void* to, const void* from, size_t num_bytes) const {
  const size_t most = job.purpose_ == CopyFor::kDevice ? piece_bytes_ : kCallersPiece * piece_bytes_;
  const uintptr_t target = reinterpret_cast<uintptr_t>(to);
  for (size_t at = 0, size; at < num_bytes; at += size) {
    size = std::min(job.purpose_ == CopyFor::kDevice ? most : most - (target + at) % most, num_bytes - at);
    job.pieces_.push_back({static_cast<unsigned char*>(to) + at, static_cast<const unsigned char*>(from) + at, size});
  }
  job.num_bytes_ += num_bytes;
  job.num_left_.store(job.pieces_.size(), std::memory_order_relaxed);
}

CopyPool::~CopyPool() {
  if (process_ != 0 && process_ != getpid()) leave_to_parent();
  is_ending_ = true;
  ++num_asked_;
  num_asked_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// After a fork: the threads are not here, and may have held the lock; nor is whoever waited for a copy.
void CopyPool::leave_to_parent() {
  new std::vector<std::thread>(std::move(threads_));  // whose ends can be neither waited for nor left to themselves
  threads_.clear();
  for (std::deque<Job*>& jobs : queues_) jobs.clear();
  lock_.unlock();
  process_ = 0;
}

void CopyPool::begin(Job& job) {
  if (job.pieces_.empty()) return;
  if (process_ != 0 && process_ != getpid()) leave_to_parent();
  const size_t num_pieces = job.pieces_.size();
  const bool is_shared = job.num_bytes_ > kAlone * piece_bytes_ && num_threads_ > 1;
  {
    std::lock_guard<SpinLock> guard(lock_);
    if (is_shared && process_ == 0) start_threads();
    queue_of(job).push_back(&job);
  }
  if (!is_shared) return;
  num_asked_.fetch_add(1, std::memory_order_release);
  const size_t wanted = std::min<size_t>(num_pieces, num_threads_) - 1;
  for (size_t i = 0; i < wanted; ++i) num_asked_.notify_one();
}

void CopyPool::start_threads() {
  process_ = getpid();
  try {
    for (int i = 1; i < num_threads_; ++i) threads_.emplace_back([this] { serve(); });
  } catch (const std::system_error&) {  // the system gives no more threads: fewer do the same work
  }
}

// A piece of this job, or of any. False where nothing is left to take.
bool CopyPool::copy_piece(Job* of) {
  Piece piece;
  {
    std::lock_guard<SpinLock> guard(lock_);
    for (size_t i = 0; of == nullptr && i < 2; ++i)
      if (!queues_[i].empty()) of = queues_[i].front();
    if (of == nullptr || of->num_taken_ == of->pieces_.size()) return false;
    piece = of->pieces_[of->num_taken_++];
    if (of->num_taken_ == of->pieces_.size()) std::erase(queue_of(*of), of);
  }
  copy(piece.to, piece.from, piece.num_bytes, of->purpose_ == CopyFor::kDevice && of->num_bytes_ < kLarge);
  of->num_left_.fetch_sub(1, std::memory_order_release);  // it may be gone from here on
  return true;
}

void CopyPool::finish(Job& job) {
  while (copy_piece(&job)) {
  }
  for (int spins = 0; job.num_left_.load(std::memory_order_acquire) != 0;) wait_a_moment(spins);
  job.pieces_.clear();
  job.num_taken_ = job.num_bytes_ = 0;
}

void CopyPool::drop(Job& job) {
  {
    std::lock_guard<SpinLock> guard(lock_);
    std::erase(queue_of(job), &job);
    job.num_left_.fetch_sub(job.pieces_.size() - job.num_taken_, std::memory_order_relaxed);
    job.num_taken_ = job.pieces_.size();
  }
  finish(job);
}

void CopyPool::serve() {
  for (;;) {
    const uint32_t seen = num_asked_.load(std::memory_order_acquire);
    if (is_ending_) return;
    while (copy_piece(nullptr)) {
    }
    for (int spins = 0; spins < kSpins && num_asked_.load(std::memory_order_relaxed) == seen; ++spins) pause();
    num_asked_.wait(seen, std::memory_order_acquire);
  }
}

}  // namespace flashtrie
