#include "draft_scan.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace flashtrie {
namespace {

constexpr int kBlock = 1024;  // values a step; 4 KB of floats stay in the first-level cache
constexpr int kLanes = 16;    // independent partial sums, so that results don't depend on the instruction set
constexpr float kInfinity = __builtin_inff();

// One register of floats and its integers. Each loop below is compiled for two widths (see Loops); wider vectors
// than the registers would be taken apart into scalars.
template <int kBytes>
struct Register {
  typedef float Floats __attribute__((vector_size(kBytes)));
  typedef int32_t Ints __attribute__((vector_size(kBytes)));
  static constexpr int kWidth = kBytes / 4;
  static constexpr int kPerStep = kLanes / kWidth;
};
#define FT_BODY inline __attribute__((always_inline))

struct BlockFacts {
  float peak;
  int32_t num_finite;
  int32_t num_bad;
};

template <typename R>
FT_BODY void look_body(const float* values, int count, BlockFacts& facts) {
  typename R::Floats peaks[R::kPerStep], x;
  typename R::Ints finite[R::kPerStep] = {}, good[R::kPerStep] = {};  // a true lane counts as -1
  for (auto& peak : peaks) peak = typename R::Floats{} - kInfinity;
  for (int i = 0; i < count; i += kLanes)
    for (int part = 0; part < R::kPerStep; ++part) {
      memcpy(&x, values + i + part * R::kWidth, sizeof x);
      peaks[part] = x > peaks[part] ? x : peaks[part];
      good[part] += x < kInfinity;
      finite[part] += x > -kInfinity;
    }
  facts = {-kInfinity, 0, count};
  for (int lane = 0; lane < kLanes; ++lane) {
    facts.peak = std::max(facts.peak, peaks[lane / R::kWidth][lane % R::kWidth]);
    facts.num_finite -= finite[lane / R::kWidth][lane % R::kWidth];
    facts.num_bad += good[lane / R::kWidth][lane % R::kWidth];
  }
}

// exp(x) for x <= 0 to about one unit in the last place; anything below 2^-126 counts as 2^-126.
template <typename R>
FT_BODY void exp_body(typename R::Floats& x) {
  using Floats = typename R::Floats;
  using Ints = typename R::Ints;
  Floats t = x * 1.44269504f;
  t = t > -126.0f ? t : Floats{} - 126.0f;
  const Floats shifted = t + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits, rounded to nearest
  const Floats f = t - (shifted - 12582912.0f);
  Floats p = f * 1.54035304e-4f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  x = (Floats)((Ints)p + ((Ints)shifted << 23));
}

template <typename R>
FT_BODY double sum_body(const float* values, int count, float peak) {
  typename R::Floats sums[R::kPerStep] = {}, x;
  for (int i = 0; i < count; i += kLanes)
    for (int part = 0; part < R::kPerStep; ++part) {
      memcpy(&x, values + i + part * R::kWidth, sizeof x);
      x -= peak;
      exp_body<R>(x);
      sums[part] += x;
    }
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane / R::kWidth][lane % R::kWidth];
  return sum;
}

FT_BODY void widen_half_body(const uint16_t* raw, int count, float* values) {
  for (int i = 0; i < count; ++i) {
    const uint32_t h = raw[i];
    const uint32_t shifted = (h & 0x7fff) << 13;
    // 2^112 moves the exponent, and subnormals come out right; infinity and NaN keep theirs.
    const uint32_t scaled = float_bits(bits_float(shifted) * 5.192296858534828e33f);
    const uint32_t special = shifted | 0x7f800000u;
    const uint32_t is_special = 0u - static_cast<uint32_t>(shifted >= 0x0f800000u);
    values[i] = bits_float((special & is_special) | (scaled & ~is_special) | (h & 0x8000) << 16);
  }
}

struct Loops {
  void (*look)(const float*, int, BlockFacts&);
  double (*sum)(const float*, int, float);
  void (*widen_half)(const uint16_t*, int, float*);
};

void look(const float* v, int n, BlockFacts& facts) { look_body<Register<16>>(v, n, facts); }
double sum(const float* v, int n, float peak) { return sum_body<Register<16>>(v, n, peak); }
void widen_half(const uint16_t* raw, int n, float* v) { widen_half_body(raw, n, v); }

#if defined(__x86_64__)
#define FT_AVX2 __attribute__((target("avx2")))
FT_AVX2 void look_avx2(const float* v, int n, BlockFacts& facts) { look_body<Register<32>>(v, n, facts); }
FT_AVX2 double sum_avx2(const float* v, int n, float peak) { return sum_body<Register<32>>(v, n, peak); }
FT_AVX2 void widen_half_avx2(const uint16_t* raw, int n, float* v) { widen_half_body(raw, n, v); }
#endif

Loops choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return {look_avx2, sum_avx2, widen_half_avx2};
#endif
  return {look, sum, widen_half};
}

const Loops kLoops = choose();

}  // namespace

float widen(uint16_t raw, LogitType type) {
  if (type == kBfloat16) return bits_float(static_cast<uint32_t>(raw) << 16);
  float value;
  widen_half_body(&raw, 1, &value);
  return value;
}

void LogitScan::clear(int32_t top_k) {
  top_k_ = top_k;
  is_bad_ = false;
  num_finite_ = 0;
  num_fed_ = 0;
  peak_ = -kInfinity;
  sum_ = 0;
  heap_.clear();
}

void LogitScan::feed(const float* values, int64_t count) {
  float tail[kLanes];
  for (int64_t at = 0; at < count;) {
    int block = static_cast<int>(std::min<int64_t>(count - at, kBlock));
    const float* run = values + at;
    if (block >= kLanes) {
      block -= block % kLanes;
    } else {  // the last few, padded with values that count for nothing
      std::fill(tail, tail + kLanes, -kInfinity);
      std::copy(run, run + block, tail);
      run = tail;
    }
    const int padded = std::max(block, kLanes);
    BlockFacts facts;
    kLoops.look(run, padded, facts);
    is_bad_ |= facts.num_bad > 0;
    num_finite_ += static_cast<uint32_t>(facts.num_finite);
    if (facts.num_finite > 0 && !is_bad_) {
      if (facts.peak > peak_) {
        sum_ *= std::exp(static_cast<double>(peak_) - facts.peak);
        peak_ = facts.peak;
      }
      sum_ += kLoops.sum(run, padded, peak_);
      const bool is_full = heap_.size() == static_cast<size_t>(top_k_);
      if (top_k_ > 0 && (!is_full || facts.peak > key_score(heap_.front()))) keep_best(run, block);
    }
    at += block;
    num_fed_ += block;
  }
}

void LogitScan::feed_raw(const void* logits, int64_t count, LogitType type) {
  if (type == kFloat32) return feed(static_cast<const float*>(logits), count);
  const uint16_t* raw = static_cast<const uint16_t*>(logits);
  float values[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int block = static_cast<int>(std::min<int64_t>(count - at, kBlock));
    if (type == kFloat16) {
      kLoops.widen_half(raw + at, block, values);
    } else {
      for (int i = 0; i < block; ++i) values[i] = widen(raw[at + i], type);
    }
    feed(values, block);
  }
}

void LogitScan::keep_best(const float* values, int64_t count) {
  const auto worst_on_top = std::greater<uint64_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (!(values[i] > -kInfinity)) continue;
    const uint64_t key = rank_key(values[i], static_cast<uint32_t>(num_fed_ + i));
    if (heap_.size() == static_cast<size_t>(top_k_)) {
      if (key < heap_.front()) continue;
      std::pop_heap(heap_.begin(), heap_.end(), worst_on_top);
      heap_.back() = key;
    } else {
      heap_.push_back(key);
    }
    std::push_heap(heap_.begin(), heap_.end(), worst_on_top);
  }
}

float LogitScan::log_sum_exp() const {
  return num_finite_ == 0 ? -kInfinity : static_cast<float>(peak_ + std::log(sum_));
}

const std::vector<ScannedValue>& LogitScan::take_best() {
  std::sort(heap_.begin(), heap_.end(), std::greater<uint64_t>());
  best_.clear();
  for (const uint64_t key : heap_) best_.push_back({key_score(key), key_node(key)});
  return best_;
}

}  // namespace flashtrie
