// The machine of cuda/flashtrie/simt.cuh on CPU fibers: every thread of every block is a fiber, scheduled at random.
// Threads interleave at barriers, votes and atomics, so a missing barrier shows as a wrong or unsteady answer.
#pragma once
#include <stddef.h>
#include <string.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define FT_DEVICE inline
#define FT_OUTLINE inline

namespace flashtrie {
namespace simt {

struct Quad {
  uint32_t x, y, z, w;
};

// Threads that wait for one another: the last to arrive opens it.
struct Meeting {
  uint32_t expected = 0, arrived = 0, generation = 0;
};

struct Warp {
  Meeting meeting;
  uint32_t values[2][32];
};

struct Block {
  std::vector<unsigned char> memory;
  unsigned char* shared = nullptr;  // aligned
  Meeting barrier;
  std::vector<Warp> warps;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  uint32_t thread = 0, block = 0;
  const Meeting* waits_for = nullptr;
  uint32_t generation = 0;
  bool done = false, waited = false;
  bool runnable() const { return !done && (!waits_for || waits_for->generation != generation); }
};

// What threads did since the counts were last cleared: barriers by block and by group, reads of the trie by size.
struct Counts {
  uint64_t block_barriers = 0, group_barriers = 0, reads16 = 0, reads8 = 0, reads4 = 0, reads2 = 0, touches = 0;
};
inline Counts& counts() {
  static Counts the;
  return the;
}

struct Machine {
  uint32_t num_threads = 0, num_blocks = 0, blocks_per_group = 1;
  std::vector<Block> blocks;
  std::vector<Meeting> groups;
  std::vector<Fiber> fibers;
  std::mt19937 random;
  ucontext_t scheduler;
  Fiber* current = nullptr;
  std::function<void(unsigned char*)> kernel;
};

inline Machine*& machine() {
  static Machine* the = nullptr;
  return the;
}

inline void yield() {
  Machine& m = *machine();
  swapcontext(&m.current->context, &m.scheduler);
}

inline void meet(Meeting& meeting) {
  Fiber& me = *machine()->current;
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    if (machine()->random() % 4 == 0) {
      me.waits_for = nullptr;
      yield();
    }
    return;
  }
  me.waits_for = &meeting;
  me.generation = meeting.generation;
  yield();
  me.waits_for = nullptr;
}

inline void maybe_yield() {
  if (machine()->random() % 64 == 0) yield();
}

inline void enter_fiber() {
  Machine& m = *machine();
  Fiber& me = *m.current;
  m.kernel(m.blocks[me.block].shared);
  me.done = true;
  swapcontext(&me.context, &m.scheduler);
}

// Runs a kernel to its end. False when the threads wait for each other for ever.
inline bool launch(uint32_t num_blocks, uint32_t blocks_per_group, uint32_t num_threads, size_t shared_bytes, uint32_t seed,
                   std::function<void(unsigned char*)> kernel) {
  Machine m;
  machine() = &m;
  m.num_threads = num_threads;
  m.num_blocks = num_blocks;
  m.blocks_per_group = blocks_per_group;
  m.random.seed(seed);
  m.kernel = std::move(kernel);
  m.blocks.resize(num_blocks);
  m.groups.resize(num_blocks / blocks_per_group);
  for (Meeting& group : m.groups) group.expected = blocks_per_group * num_threads;
  for (Block& block : m.blocks) {
    block.memory.assign(shared_bytes + 64, 0xa5);  // shared memory starts as anything but zeros
    block.shared = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(block.memory.data()) + 63) / 64 * 64);
    block.barrier.expected = num_threads;
    block.warps.resize(num_threads / 32);
    for (Warp& warp : block.warps) warp.meeting.expected = 32;
  }
  constexpr size_t kStack = 128 * 1024;
  m.fibers.resize(static_cast<size_t>(num_blocks) * num_threads);
  for (size_t i = 0; i < m.fibers.size(); ++i) {
    Fiber& fiber = m.fibers[i];
    fiber.block = i / num_threads;
    fiber.thread = i % num_threads;
    fiber.stack.reset(new unsigned char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter_fiber, 0);
  }
  const size_t num_warps = m.fibers.size() / 32;
  std::vector<size_t> alive(num_warps);
  for (size_t i = 0; i < num_warps; ++i) alive[i] = i;
  size_t idle = 0;  // warps in a row in which nobody could run
  while (!alive.empty()) {
    const size_t pick = m.random() % alive.size();
    Fiber* lanes = &m.fibers[alive[pick] * 32];
    bool ran = false;
    for (int turns = 1 + m.random() % 16; turns > 0; --turns) {
      bool ran_now = false;
      const uint32_t first = m.random();
      for (uint32_t lane = 0; lane < 32; ++lane) {
        Fiber& fiber = lanes[(first + lane) % 32];
        if (!fiber.runnable()) continue;
        m.current = &fiber;
        swapcontext(&m.scheduler, &fiber.context);
        ran_now = true;
      }
      if (!ran_now) break;
      ran = true;
    }
    bool done = true;
    for (uint32_t lane = 0; lane < 32; ++lane) done &= lanes[lane].done;
    if (done) {
      alive[pick] = alive.back();
      alive.pop_back();
    }
    idle = ran ? 0 : idle + 1;
    if (idle > 1000 * (num_warps + 1)) return false;
  }
  return true;
}

constexpr uint32_t kAllLanes = 0xffffffffu;
inline uint32_t thread() { return machine()->current->thread; }
inline uint32_t num_threads() { return machine()->num_threads; }
inline uint32_t lane() { return thread() & 31; }
inline uint32_t block() { return machine()->current->block; }
inline uint32_t num_blocks() { return machine()->num_blocks; }
inline uint32_t lanes_below() { return (1u << lane()) - 1; }
inline Block& this_block() { return machine()->blocks[block()]; }

inline void sync_block() {
  counts().block_barriers += thread() == 0;
  meet(this_block().barrier);
}
inline void prefetch(const void*) {}
inline void touch(const void* at, uint32_t*) {
  ++counts().touches;
  volatile uint32_t unused = *static_cast<const uint32_t*>(at);  // so that a bad address shows
  (void)unused;
}

// Every lane leaves a value and then sees those of all.
inline const uint32_t* exchange(uint32_t value) {
  Warp& warp = this_block().warps[thread() / 32];
  uint32_t* values = warp.values[warp.meeting.generation & 1];
  values[lane()] = value;
  meet(warp.meeting);
  return values;
}
inline void sync_warp() { exchange(0); }

inline uint32_t ballot(bool vote) {
  const uint32_t* votes = exchange(vote);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= votes[i] << i;
  return bits;
}
inline bool any(bool vote) { return ballot(vote) != 0; }
inline uint32_t shuffle(uint32_t value, uint32_t from) { return exchange(value)[from & 31]; }
inline uint32_t shuffle_up(uint32_t value, uint32_t by) { return exchange(value)[lane() >= by ? lane() - by : lane()]; }
inline uint32_t count_ones(uint32_t word) { return __builtin_popcount(word); }
inline uint32_t lowest_one(uint32_t word) { return __builtin_ctz(word); }
inline uint32_t reduce_add(uint32_t value) {
  const uint32_t* values = exchange(value);
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += values[i];
  return sum;
}
inline uint32_t reduce_or(uint32_t value) {
  const uint32_t* values = exchange(value);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= values[i];
  return bits;
}
inline uint32_t reduce_max(uint32_t value) {
  const uint32_t* values = exchange(value);
  uint32_t most = 0;
  for (int i = 0; i < 32; ++i) most = values[i] > most ? values[i] : most;
  return most;
}

inline uint32_t atomic_add(uint32_t* at, uint32_t value) {
  maybe_yield();
  const uint32_t before = *at;
  *at += value;
  return before;
}
inline uint64_t atomic_add(uint64_t* at, uint64_t value) {
  maybe_yield();
  const uint64_t before = *at;
  *at += value;
  return before;
}
inline void atomic_or(uint32_t* at, uint32_t value) {
  maybe_yield();
  *at |= value;
}
template <typename T>
void atomic_max(T* at, T value) {
  maybe_yield();
  if (value > *at) *at = value;
}
inline uint32_t atomic_exchange(uint32_t* at, uint32_t value) {
  maybe_yield();
  const uint32_t before = *at;
  *at = value;
  return before;
}
inline uint32_t atomic_replace(uint32_t* at, uint32_t expected, uint32_t value) {
  maybe_yield();
  const uint32_t before = *at;
  if (before == expected) *at = value;
  return before;
}
inline uint32_t atomic_increment(uint32_t* at, uint32_t last) {
  maybe_yield();
  const uint32_t before = *at;
  *at = before >= last ? 0 : before + 1;
  return before;
}

template <typename T>
const T* at(const T* array, uint32_t index) {
  return array + index;
}
inline Quad load_quad(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % 16 != 0) abort();
  ++counts().reads16;
  Quad quad;
  memcpy(&quad, at, sizeof quad);
  return quad;
}
struct Pair {
  uint32_t x, y;
};
inline Pair load_pair(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % 8 != 0) abort();
  ++counts().reads8;
  Pair pair;
  memcpy(&pair, at, sizeof pair);
  return pair;
}
inline void store_quad(Quad* at, const Quad& quad) { memcpy(at, &quad, sizeof quad); }
inline void store_pair(uint32_t* at, const Pair& pair) { memcpy(at, &pair, sizeof pair); }
inline void load_quad_if(bool wanted, const Quad* at, Quad* to) {
  if (wanted) memcpy(to, at, sizeof *to);
}
inline void release_next_kernel() {}
// What the kernel before has not written yet may be anything.
inline void await_previous_kernel() { machine()->current->waited = true; }
inline uint32_t load_changing(const uint32_t* at) {
  Machine& m = *machine();
  if (m.current->waited || m.random() % 2 == 0) return *at;
  return m.random() % 2 == 0 ? m.random() : m.random() % 8;
}

template <typename T>
T load_word(const T* at) {
  (sizeof(T) == 8 ? counts().reads8 : sizeof(T) == 4 ? counts().reads4 : counts().reads2) += 1;
  return *at;
}

inline float half_to_float(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  float value;
  if (exponent == 31)
    value = mantissa ? NAN : INFINITY;
  else if (exponent == 0)
    value = ldexpf(static_cast<float>(mantissa), -24);
  else
    value = ldexpf(static_cast<float>(mantissa + 1024), exponent - 25);
  return bits & 0x8000 ? -value : value;
}

inline int64_t clock() { return 0; }

template <int kBlocks>
uint32_t rank() {
  return block() % kBlocks;
}

template <int kBlocks, typename T>
T* in_block(T* mine, uint32_t rank) {
  if (kBlocks == 1) return mine;
  const uint32_t theirs = block() / kBlocks * kBlocks + rank;
  const ptrdiff_t offset = reinterpret_cast<const unsigned char*>(mine) - this_block().shared;
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(machine()->blocks[theirs].shared) + offset);
}

template <int kBlocks>
void sync_group() {
  if (kBlocks == 1)
    sync_block();
  else {
    counts().group_barriers += thread() == 0;
    meet(machine()->groups[block() / kBlocks]);
  }
}

}  // namespace simt
}  // namespace flashtrie
