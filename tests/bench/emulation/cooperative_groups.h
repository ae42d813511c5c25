#pragma once
#include <stdint.h>

namespace cooperative_groups {
struct coalesced_group {  // of one thread: threads of an emulated warp do not run in step
  uint32_t thread_rank() const { return 0; }
  uint32_t size() const { return 1; }
  uint32_t shfl(uint32_t value, int) const { return value; }
};
inline coalesced_group coalesced_threads() { return {}; }
}  // namespace cooperative_groups
