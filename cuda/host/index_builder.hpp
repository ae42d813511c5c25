// From keys in any order to the sections of a narrow-LOUDS index: sort, make unique, lay out the levels.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "key_sorter.hpp"
#include "level_store.hpp"

namespace flashtrie {

enum class Duplicates { kFirst, kLast, kMin, kMax, kSum, kAll, kError };
enum class ValueKind { kNone, kUnsigned, kFloat };

// Two keys that should not stand as they do; the places are those given to `add`.
struct KeyConflict : std::runtime_error {
  KeyConflict(const char* what, uint64_t first_place, uint64_t second_place, std::vector<uint32_t> key)
      : std::runtime_error(what), first(first_place), second(second_place), tokens(std::move(key)) {}
  uint64_t first, second;
  std::vector<uint32_t> tokens;
};

struct BuilderOptions {
  uint64_t memory = 256u << 20;  // bytes for sorting and for the levels together
  int num_threads = 1;
  std::string temp_directory;
  Duplicates duplicates = Duplicates::kFirst;
  ValueKind value_kind = ValueKind::kNone;
  bool is_sorted = false;  // trust the order, but check it
  bool is_compact = true;  // label_delta and inner_terminal, for compression, instead of label_low and terminal
};

struct BuildCounts {
  uint64_t num_keys_read = 0;
  uint64_t num_keys = 0;
  uint64_t num_duplicates = 0;
  uint64_t num_nodes = 1;
  uint64_t num_tokens = 0;  // over unique keys
  uint64_t depth = 0;
  uint64_t num_runs = 0;
  uint64_t spilled_bytes = 0;
  uint64_t num_highs = 0;
  int high_width = 0;
  double label_entropy = 0;  // bits a node, order 0
};

class IndexBuilder {
 public:
  using Chunk = std::function<void(const uint8_t*, size_t)>;

  explicit IndexBuilder(const BuilderOptions& options);

  // `place` is opaque (file and line) and comes back in KeyConflict.
  void add(const uint32_t* tokens, uint32_t length, uint64_t value, uint64_t place);
  // Call once, after the last key.
  void finish(const KeySorter::Poll& poll);
  BuildCounts counts() const;

  // The bytes of one section, front to back, in pieces. Section names as in docs/format.md.
  void read(const std::string& section, const Chunk& chunk) const;
  bool has(const std::string& section) const;

 private:
  void take_sorted(const KeyRef& key);
  void settle();  // the key at hand is complete: lay it out
  void append(const std::vector<uint32_t>& tokens);
  void open_node(size_t depth, uint32_t token, uint32_t previous_sibling, bool is_terminal);
  void close_node(size_t depth);
  void combine(uint64_t value);
  void spill_levels();
  void count_label(uint32_t label);
  void read_bits(BitStream Level::*stream, bool pad_to_nodes, const Chunk& chunk) const;

  BuilderOptions options_;
  TempFile spill_;
  KeySorter sorter_;
  std::vector<Level> levels_;  // levels_[d] holds the nodes at depth d; the root is levels_[0]
  std::vector<uint32_t> path_;  // tokens of the last key laid out
  std::vector<uint8_t> path_terminal_;  // for each depth from 0: whether that node of the path is terminal
  bool has_pending_ = false;
  std::vector<uint32_t> pending_;
  std::vector<uint64_t> pending_values_;
  uint64_t pending_place_ = 0;
  uint64_t level_bytes_ = 0;  // grown since the last spill
  BuildCounts counts_;
  std::vector<uint64_t> label_counts_;
  std::unordered_map<uint32_t, uint64_t> rare_label_counts_;
  uint32_t largest_label_ = 0;
};

}  // namespace flashtrie
