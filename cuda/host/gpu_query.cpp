#include "gpu_query.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "pause.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashtrie {
namespace {

// Of a grid, from the caller's memory to the staging.
struct GridPart {
  unsigned char* to;
  const unsigned char* from;
  size_t num_bytes;
};

constexpr uint32_t kBlockWords = 64;     // taken together, and again where one is still unwritten
constexpr uint32_t kSpins = 1 << 10;     // before the driver is asked whether the kernel is still at it: some 40 us
constexpr uint32_t kLooks = 1 << 14;     // at the stream, before the caller is asked: some 10 ms
constexpr uint32_t kPatience = 1 << 8;   // such rounds before the caller is asked whether to go on: some 10 ms

constexpr uint32_t kPrefetched = 1 << 10;  // words: the processor keeps ahead by itself after that

// An answer that may be of more words is taken once the kernel has ended: to look at each word costs more than the end is
// late (measured on an H200: 1.3 us more at 1,200 words, 2.5 us less at 12,000).
constexpr uint32_t kWatched = 1 << 12;

constexpr size_t kFetchBytes = 16;  // which the kernel fetches at once

// A larger grid is written past the processor's caches, from where the bus would have to fetch it back.
constexpr size_t kCached = 16 << 10;

void prefetch(const uint32_t* words, uint32_t count) {
  for (uint32_t at = 0; at < std::min(count, kPrefetched); at += 16) __builtin_prefetch(words + at);
}

#if defined(__x86_64__)
__attribute__((target("avx"))) void copy_line(unsigned char* to, const unsigned char* from) {
  __builtin_prefetch(from + 4 * 64);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
}

// Two arrays, each from both its ends' halves at once: four streams that the processor fetches ahead.
__attribute__((target("avx"))) void copy_past_caches(const GridPart (&parts)[2]) {
  constexpr size_t kLine = 64;
  size_t halves[2], common = ~size_t{0};
  for (int i = 0; i < 2; ++i) {
    halves[i] = parts[i].num_bytes / 2 / kLine * kLine;
    common = std::min(common, halves[i]);
  }
  for (size_t at = 0; at < common; at += kLine)
    for (int i = 0; i < 2; ++i) {
      copy_line(parts[i].to + at, parts[i].from + at);
      copy_line(parts[i].to + halves[i] + at, parts[i].from + halves[i] + at);
    }
  for (int i = 0; i < 2; ++i) {
    std::memcpy(parts[i].to + common, parts[i].from + common, halves[i] - common);
    const size_t done = halves[i] + common;
    std::memcpy(parts[i].to + done, parts[i].from + done, parts[i].num_bytes - done);
  }
  _mm_sfence();
}
#endif

void stage(const GridPart (&parts)[2]) {
#if defined(__x86_64__)
  const auto alignment = (reinterpret_cast<uintptr_t>(parts[0].to) | reinterpret_cast<uintptr_t>(parts[1].to)) % 32;
  if (parts[0].num_bytes + parts[1].num_bytes > kCached && alignment == 0 && __builtin_cpu_supports("avx"))
    return copy_past_caches(parts);
#endif
  for (const GridPart& part : parts) std::memcpy(part.to, part.from, part.num_bytes);
}

}  // namespace

GpuQuery::GpuQuery(const GpuDriver& driver, GpuLaunch launch, void* tokens, size_t token_bytes, void* logprobs,
                   size_t logprob_bytes, const GpuAnswer& first, const GpuAnswer& second, uint32_t most_hits,
                   uint32_t most_tokens)
    : driver_(driver), launch_(std::move(launch)), tokens_(static_cast<unsigned char*>(tokens)),
      logprobs_(static_cast<unsigned char*>(logprobs)), token_bytes_(token_bytes), logprob_bytes_(logprob_bytes),
      answers_{first, second}, most_hits_(most_hits), most_tokens_(most_tokens),
      is_watched_(uint64_t{4} * most_hits + most_tokens <= kWatched) {
  for (const GpuAnswer& answer : answers_) clear(answer, most_hits, most_tokens);
}

int GpuQuery::start(const void* tokens, const void* logprobs, bool are_mapped) {
  settle();
  turn_ ^= 1;
  const auto alignment = (reinterpret_cast<uintptr_t>(tokens) | reinterpret_cast<uintptr_t>(logprobs)) % kFetchBytes;
  if (!are_mapped || alignment != 0) {
    stage({{tokens_, static_cast<const unsigned char*>(tokens), token_bytes_},
           {logprobs_, static_cast<const unsigned char*>(logprobs), logprob_bytes_}});
    tokens = tokens_;
    logprobs = logprobs_;
  }
  std::memcpy(launch_.records[turn_].data() + launch_.tokens_at, &tokens, sizeof tokens);
  std::memcpy(launch_.records[turn_].data() + launch_.logprobs_at, &logprobs, sizeof logprobs);
  const int code = launch();
  is_running_ = code == 0;
  // The kernel writes to this turn's answer; the other one's words are for the next.
  clear(answers_[turn_ ^ 1], is_watched_ ? used_hits_ : 0, is_watched_ ? used_tokens_ : 0);
  used_hits_ = used_tokens_ = 0;
  return code;
}

int GpuQuery::launch() {
  void* parameters[] = {launch_.records[turn_].data()};
  if (launch_.events[0])
    if (const int code = driver_.record(launch_.events[0], launch_.stream)) return code;
  if (const int code = driver_.launch(launch_.function, launch_.num_blocks, 1, 1, launch_.num_threads, 1, 1,
                                      launch_.shared_bytes, launch_.stream, parameters, nullptr))
    return code;
  return launch_.events[1] ? driver_.record(launch_.events[1], launch_.stream) : 0;
}

GpuOutcome GpuQuery::finish(const GpuHits& to, const std::function<void()>& interrupted) {
  if (!is_running_) throw GpuError{0};
  const GpuAnswer& from = answers_[turn_];
  interrupted_ = &interrupted;
  spins_ = patience_ = 0;
  try {
    if (!is_watched_) wait_for_end();
    // The number of tokens is written last, so that the rest is not looked at while it is written; but only mostly.
    GpuOutcome outcome{0, word(from.num_tokens), word(from.bad_slot)};
    outcome.num_hits = word(from.num_hits);
    if (outcome.bad_slot != ~0u) {  // scores may be no numbers: nothing of them is looked at
      settle();
      return outcome;
    }
    outcome.num_hits = std::min(outcome.num_hits, most_hits_);
    outcome.num_tokens = std::min(outcome.num_tokens, most_tokens_);
    for (const uint32_t* array : {from.key_ids, from.scores, from.normalised_scores, from.token_ends})
      prefetch(array, outcome.num_hits);
    prefetch(from.tokens, outcome.num_tokens);
    const auto copy_to = [](uint32_t* array) {
      return [array](uint32_t at, const uint32_t* words, uint32_t count) { std::memcpy(array + at, words, 4 * count); };
    };
    take(from.key_ids, outcome.num_hits, copy_to(to.key_ids));
    take(from.scores, outcome.num_hits, copy_to(to.scores));
    take(from.normalised_scores, outcome.num_hits, copy_to(to.normalised_scores));
    to.token_offsets[0] = 0;
    take(from.token_ends, outcome.num_hits, [&](uint32_t at, const uint32_t* words, uint32_t count) {
      for (uint32_t i = 0; i < count; ++i) to.token_offsets[at + i + 1] = words[i];
    });
    take(from.tokens, outcome.num_tokens, copy_to(to.tokens));
    used_hits_ = outcome.num_hits;
    used_tokens_ = outcome.num_tokens;
    is_running_ = false;
    return outcome;
  } catch (...) {
    settle();
    throw;
  }
}

// Words that have arrived, a block at a time; waits for those that have not, while they are watched.
template <typename Take>
void GpuQuery::take(const uint32_t* from, uint32_t count, const Take& take) {
  if (!is_watched_) return take(0, from, count);
  uint32_t words[kBlockWords];
  for (uint32_t at = 0; at < count; at += kBlockWords) {
    const uint32_t here = std::min(kBlockWords, count - at);
    for (;;) {
      std::atomic_signal_fence(std::memory_order_seq_cst);  // these words change under the compiler
      std::memcpy(words, from + at, 4 * here);
      std::atomic_signal_fence(std::memory_order_seq_cst);
      uint32_t missing = 0;
      for (uint32_t i = 0; i < here; ++i) missing |= words[i] == kUnwritten;
      if (!missing) break;
      wait();
    }
    take(at, words, here);
  }
}

uint32_t GpuQuery::word(const uint32_t* at) {
  uint32_t value = kUnwritten;
  take(at, 1, [&](uint32_t, const uint32_t* words, uint32_t) { value = *words; });
  if (value == kUnwritten) throw GpuError{0};
  return value;
}

void GpuQuery::wait_for_end() {
  for (;;) {
    const int code = driver_.query(launch_.stream);
    if (code == 0) break;
    if (code != kGpuNotReady) throw GpuError{code};
    pause();
    if (++spins_ % kLooks == 0) (*interrupted_)();
  }
  std::atomic_thread_fence(std::memory_order_acquire);
}

// A moment. Now and then a look at the kernel, which may have failed, and at the caller, who may have lost interest.
void GpuQuery::wait() {
  pause();
  if (++spins_ < kSpins) return;
  if (spins_ == ~0u) throw GpuError{0};  // it had ended, and words were missing all the same
  spins_ = 0;
  const int code = driver_.query(launch_.stream);
  if (code != 0 && code != kGpuNotReady) throw GpuError{code};
  if (code == 0) spins_ = ~0u - 1;  // all is written: one more look
  if (++patience_ < kPatience) return;
  patience_ = 0;
  (*interrupted_)();
}

// Puts words back to kUnwritten: the counts, and of the arrays so many.
void GpuQuery::clear(const GpuAnswer& answer, uint32_t num_hits, uint32_t num_tokens) {
  for (uint32_t* count : {answer.num_hits, answer.num_tokens, answer.bad_slot}) *count = kUnwritten;
  for (uint32_t* array : {answer.key_ids, answer.scores, answer.normalised_scores, answer.token_ends})
    std::fill_n(array, num_hits, kUnwritten);
  std::fill_n(answer.tokens, num_tokens, kUnwritten);
}

// Nothing is under way afterwards, and all of this turn's answer is to be cleared.
void GpuQuery::settle() {
  if (!is_running_) return;
  driver_.synchronize(launch_.stream);
  is_running_ = false;
  used_hits_ = most_hits_;
  used_tokens_ = most_tokens_;
}

}  // namespace flashtrie
