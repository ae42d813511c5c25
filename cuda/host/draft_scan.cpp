#include "draft_scan.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace flashtrie {
namespace {

constexpr int kBlock = 1024;  // values a step; 4 KB of floats stay in the first-level cache
constexpr int kLanes = 16;    // independent partial sums: the result doesn't depend on the vector width

struct BlockFacts {
  float peak;
  int32_t num_finite;
  int32_t num_bad;
};

// The loops below are written for the compiler's vectoriser and compiled once for each instruction set.
#define FT_BODY inline __attribute__((always_inline))

FT_BODY BlockFacts look_body(const float* values, int count) {
  float peaks[kLanes];
  int32_t finite[kLanes] = {}, bad[kLanes] = {};
  for (int lane = 0; lane < kLanes; ++lane) peaks[lane] = -__builtin_inff();
  for (int i = 0; i < count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = values[i + lane];
      peaks[lane] = x > peaks[lane] ? x : peaks[lane];
      bad[lane] += x < __builtin_inff() ? 0 : 1;
      finite[lane] += x > -__builtin_inff() ? 1 : 0;
    }
  BlockFacts facts{-__builtin_inff(), 0, 0};
  for (int lane = 0; lane < kLanes; ++lane) {
    facts.peak = std::max(facts.peak, peaks[lane]);
    facts.num_finite += finite[lane];
    facts.num_bad += bad[lane];
  }
  return facts;
}

// exp(x) for x <= 0 to about one unit in the last place; anything below 2^-126 counts as 2^-126.
FT_BODY float exp_body(float x) {
  const float t = std::max(x * 1.44269504f, -126.0f);
  const float shifted = t + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits, rounded to nearest
  const float f = t - (shifted - 12582912.0f);
  float p = 1.54035304e-4f;
  p = p * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  uint32_t bits, scale;
  memcpy(&bits, &shifted, 4);
  memcpy(&scale, &p, 4);
  scale += bits << 23;
  memcpy(&p, &scale, 4);
  return p;
}

FT_BODY double sum_body(const float* values, int count, float peak) {
  float sums[kLanes] = {};
  for (int i = 0; i < count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += exp_body(values[i + lane] - peak);
  double sum = 0;
  for (float part : sums) sum += part;
  return sum;
}

FT_BODY void widen_half_body(const uint16_t* raw, int count, float* values) {
  for (int i = 0; i < count; ++i) {
    const uint32_t h = raw[i];
    uint32_t bits = (h & 0x7fff) << 13;
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude *= 5.192296858534828e33f;  // 2^112 moves the exponent; subnormals come out right
    memcpy(&bits, &magnitude, 4);
    bits = (h & 0x7c00) == 0x7c00 ? ((h & 0x7fff) << 13) | 0x7f800000u : bits;
    bits |= (h & 0x8000) << 16;
    memcpy(values + i, &bits, 4);
  }
}

struct Loops {
  BlockFacts (*look)(const float*, int);
  double (*sum)(const float*, int, float);
  void (*widen_half)(const uint16_t*, int, float*);
};

BlockFacts look(const float* v, int n) { return look_body(v, n); }
double sum(const float* v, int n, float peak) { return sum_body(v, n, peak); }
void widen_half(const uint16_t* raw, int n, float* v) { widen_half_body(raw, n, v); }

#if defined(__x86_64__)
#define FT_AVX2 __attribute__((target("avx2")))
FT_AVX2 BlockFacts look_avx2(const float* v, int n) { return look_body(v, n); }
FT_AVX2 double sum_avx2(const float* v, int n, float peak) { return sum_body(v, n, peak); }
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

void LogitScan::clear() {
  is_bad_ = false;
  num_finite_ = 0;
  num_fed_ = 0;
  peak_ = -__builtin_inff();
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
      std::fill(tail, tail + kLanes, -__builtin_inff());
      std::copy(run, run + block, tail);
      run = tail;
    }
    const int padded = std::max(block, kLanes);
    const BlockFacts facts = kLoops.look(run, padded);
    is_bad_ |= facts.num_bad > 0;
    num_finite_ += static_cast<uint32_t>(facts.num_finite);
    if (facts.num_finite > 0 && !is_bad_) {
      if (facts.peak > peak_) {
        sum_ *= std::exp(static_cast<double>(peak_) - facts.peak);
        peak_ = facts.peak;
      }
      sum_ += kLoops.sum(run, padded, peak_);
      const bool full = heap_.size() == static_cast<size_t>(top_k_);
      if (!full || facts.peak > key_score(heap_.front())) keep_best(run, block);
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
  if (top_k_ == 0) return;
  const auto worst_on_top = std::greater<uint64_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (!(values[i] > -__builtin_inff())) continue;
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
  return num_finite_ == 0 ? -__builtin_inff() : static_cast<float>(peak_ + std::log(sum_));
}

const std::vector<ScannedValue>& LogitScan::take_best() {
  std::sort(heap_.begin(), heap_.end(), std::greater<uint64_t>());
  best_.clear();
  for (const uint64_t key : heap_) best_.push_back({key_score(key), key_node(key)});
  return best_;
}

}  // namespace flashtrie
