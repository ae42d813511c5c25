// A fixed set of threads that run one body together, again and again: for work shorter than starting a thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace flashtrie {

class WorkerPool {
 public:
  explicit WorkerPool(int num_threads) {
    for (int worker = 1; worker < num_threads; ++worker) threads_.emplace_back([this, worker] { serve(worker); });
  }

  ~WorkerPool() {
    stop_ = true;
    start();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls body(worker) on every worker, the caller being worker 0, and returns when all have. The body must not throw.
  template <typename Body>
  void run(const Body& body) {
    if (!threads_.empty()) {
      call_ = [](const void* context, int worker) { (*static_cast<const Body*>(context))(worker); };
      context_ = &body;
      running_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
      start();
    }
    body(0);
    for (uint32_t left; (left = running_.load(std::memory_order_acquire)) > 0;) running_.wait(left);
  }

 private:
  void start() {
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }

  void serve(int worker) {
    for (uint32_t seen = 0;;) {
      round_.wait(seen, std::memory_order_acquire);
      ++seen;
      if (stop_) return;
      call_(context_, worker);
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::atomic<uint32_t> round_{0};
  std::atomic<uint32_t> running_{0};
  void (*call_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stop_{false};
};

}  // namespace flashtrie
