// Plain fork-join over ranges. Nothing here outlives a call, so there is no pool to tear down.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace flashtrie {

// Calls body(worker, begin, end) for slices of [0, count) of at most `grain`, taken from a counter by
// `num_threads` workers. The first exception of any worker is rethrown after all have stopped.
template <typename Body>
void parallel_for(uint64_t count, uint64_t grain, int num_threads, const Body& body) {
  grain = std::max<uint64_t>(grain, 1);
  const uint64_t slices = (count + grain - 1) / grain;
  const int workers = static_cast<int>(std::min<uint64_t>(std::max(num_threads, 1), slices));
  if (workers <= 1) {
    for (uint64_t begin = 0; begin < count; begin += grain) body(0, begin, std::min(count, begin + grain));
    return;
  }
  std::atomic<uint64_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  auto run = [&](int worker) {
    try {
      for (uint64_t slice; (slice = next.fetch_add(1)) < slices;)
        body(worker, slice * grain, std::min(count, (slice + 1) * grain));
    } catch (...) {
      next.store(slices);
      std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int worker = 1; worker < workers; ++worker) threads.emplace_back(run, worker);
  } catch (const std::system_error&) {  // the system gives no more threads: fewer do the same work
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace flashtrie
