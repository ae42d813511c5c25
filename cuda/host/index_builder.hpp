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
#include "tail_store.hpp"
#include "trie_layout.hpp"

namespace flashtrie {

enum class Duplicates { kFirst, kLast, kMin, kMax, kSum, kAll, kError };
enum class ValueKind { kNone, kUnsigned, kFloat };
enum class Tails { kOff, kOn, kBoth };  // kBoth: laid out either way, until `use_tails` says which is read

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
  Tails tails = Tails::kOff;
};

struct BuildCounts {
  uint64_t num_keys_read = 0;
  uint64_t num_keys = 0;
  uint64_t num_duplicates = 0;
  uint64_t num_nodes = 1;   // those in tails, too
  uint64_t num_tokens = 0;  // over unique keys
  uint64_t depth = 0;
  uint64_t num_runs = 0;
  uint64_t spilled_bytes = 0;
  uint64_t num_highs = 0;
  int high_width = 0;
  double label_entropy = 0;  // bits a node, order 0
  TailCounts tails;
};

class IndexBuilder {
 public:
  using Chunk = flashtrie::Chunk;

  explicit IndexBuilder(const BuilderOptions& options);

  // `place` is opaque (file and line) and comes back in KeyConflict.
  void add(const uint32_t* tokens, uint32_t length, uint64_t value, uint64_t place);
  // Call once, after the last key.
  void finish(const KeySorter::Poll& poll);
  BuildCounts counts() const;
  // After a build of either way: whether what is read has its tails cut off.
  void use_tails(bool cut);

  // The bytes of one section, front to back, in pieces. Section names as in docs/format.md.
  void read(const std::string& section, const Chunk& chunk) const;
  bool has(const std::string& section) const;

 private:
  struct LevelValues {
    Stream values;  // uint64 a value, keys in order
    Stream counts;  // uint32 a key, with several values a key
  };

  void take_sorted(const KeyRef& key);
  // The key at hand is complete: lays it out. It shares its first `common_next` tokens with the next one.
  void settle(size_t common_next);
  void combine(uint64_t value);
  void spill_levels();
  void count_label(uint32_t label);

  BuilderOptions options_;
  TempFile spill_;
  std::optional<KeySorter> sorter_;
  std::optional<TrieLayout> whole_, cut_;
  const TrieLayout* shown_ = nullptr;
  std::optional<TailStore> tails_;
  std::vector<LevelValues> values_;  // by the length of the key
  size_t common_ = 0;                // tokens that the key at hand shares with the one before
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
