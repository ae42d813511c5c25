// Sorts token sequences within a memory cap: chunks are sorted in memory, spilled as front-coded runs, merged.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "temp_file.hpp"

namespace flashtrie {

// What a key may carry through the sort.
struct KeyRef {
  const uint32_t* tokens = nullptr;
  uint32_t length = 0;
  uint64_t value = 0;  // bits of the value; 0 without values
  uint64_t place = 0;  // where the key was read (file and line), for messages
};

// Lexicographic by token, a prefix before its extensions; negative, zero or positive.
int compare_keys(const uint32_t* a, uint32_t a_length, const uint32_t* b, uint32_t b_length);

struct SorterOptions {
  uint64_t memory = 256u << 20;  // bytes for the chunk in memory
  int num_threads = 1;
  bool has_values = false;
  bool has_places = false;
};

class KeySorter {
 public:
  using Sink = std::function<void(const KeyRef&)>;
  using Poll = std::function<void()>;  // called now and then; may throw to stop

  KeySorter(const SorterOptions& options, TempFile& spill);
  ~KeySorter();

  void add(const KeyRef& key);
  // Hands every key, duplicates included, to `sink` in ascending order; equal keys in the order they were added.
  void drain(const Sink& sink, const Poll& poll);

  uint64_t num_runs() const { return runs_.size(); }
  uint64_t spilled_bytes() const { return spilled_bytes_; }

 private:
  struct Record;
  struct Run {
    uint64_t offset, size;
  };
  class Cursor;
  class MemoryCursor;
  class RunCursor;

  KeyRef at(const Record& record) const;
  void sort_chunk();
  void spill_chunk();

  SorterOptions options_;
  TempFile& spill_;
  int header_words_;  // words in front of a key's tokens in the arena: value, place
  uint64_t arena_capacity_;
  std::unique_ptr<uint32_t[]> arena_;
  uint64_t arena_size_ = 0;
  std::vector<Record> records_;
  std::vector<Record> scratch_;
  std::vector<Run> runs_;
  uint64_t spilled_bytes_ = 0;
};

}  // namespace flashtrie
