// One pass over a run of logits: its log-sum-exp and its top_k largest values.
#pragma once
#include <cstdint>
#include <vector>

#include "flashtrie/draft.cuh"

namespace flashtrie {

struct ScannedValue {
  float logit;
  uint32_t position;
};

// One 16-bit logit as float32, exactly.
float widen(uint16_t raw, LogitType type);

// Feed values in ascending order of token id; positions count from 0 over all that was fed.
class LogitScan {
 public:
  void clear(int32_t top_k);
  void feed(const float* values, int64_t count);
  void feed_raw(const void* logits, int64_t count, LogitType type);

  // Whether a NaN or +inf was fed; then nothing else means anything.
  bool is_bad() const { return is_bad_; }
  uint32_t num_finite() const { return num_finite_; }
  // Log of the sum of exponentials, -inf where nothing finite was fed.
  float log_sum_exp() const;
  // The largest finite values, best first; ties by position. Ends the scan.
  const std::vector<ScannedValue>& take_best();

 private:
  void keep_best(const float* values, int64_t count);

  int32_t top_k_ = 0;
  bool is_bad_ = false;
  uint32_t num_finite_ = 0;
  int64_t num_fed_ = 0;
  float peak_ = -__builtin_inff();
  double sum_ = 0;                // of exp(value - peak_)
  std::vector<uint64_t> heap_;    // rank keys of the kept values, the worst on top
  std::vector<ScannedValue> best_;
};

}  // namespace flashtrie
