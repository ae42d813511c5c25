#include "index_builder.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace flashtrie {
namespace {

constexpr uint32_t kDenseLabels = 1u << 22;
constexpr uint64_t kMaxNodes = 0xffffffffull;

// Half of the cap sorts. The other half is for the levels, which are the finished index, and for what the
// process holds besides.
SorterOptions sorter_options(const BuilderOptions& options) {
  SorterOptions sorter;
  sorter.memory = options.is_sorted ? 1 << 12 : options.memory / 8 * 7;
  sorter.num_threads = options.num_threads;
  sorter.has_values = options.value_kind != ValueKind::kNone;
  // Only these rules can find fault with a key once it is sorted.
  sorter.has_places = options.duplicates == Duplicates::kError ||
                      (options.duplicates == Duplicates::kSum && options.value_kind == ValueKind::kUnsigned);
  return sorter;
}

double as_float(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

uint64_t as_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Gathers pieces into larger ones, so that the receiver is called seldom.
class Batcher {
 public:
  explicit Batcher(const IndexBuilder::Chunk& chunk) : chunk_(chunk) { buffer_.reserve(kBytes + 64); }
  void put(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    buffer_.insert(buffer_.end(), bytes, bytes + size);
    if (buffer_.size() >= kBytes) flush();
  }
  void flush() {
    if (!buffer_.empty()) chunk_(buffer_.data(), buffer_.size());
    buffer_.clear();
  }

 private:
  static constexpr size_t kBytes = 1 << 16;
  const IndexBuilder::Chunk& chunk_;
  std::vector<uint8_t> buffer_;
};

// Joins bit strings of any length end to end into 64-bit words.
class BitJoiner {
 public:
  explicit BitJoiner(Batcher& to) : to_(to) {}
  void put(uint64_t bits, int count) {  // count 1 to 64, bits above count zero
    word_ |= bits << used_;
    if (used_ + count >= 64) {
      to_.put(&word_, 8);
      word_ = used_ == 0 ? 0 : bits >> (64 - used_);
      used_ += count - 64;
    } else {
      used_ += count;
    }
  }
  void finish() {
    if (used_ > 0) to_.put(&word_, 8);
    word_ = 0;
    used_ = 0;
  }

 private:
  Batcher& to_;
  uint64_t word_ = 0;
  int used_ = 0;
};

}  // namespace

IndexBuilder::IndexBuilder(const BuilderOptions& options)
    : options_(options), spill_(options.temp_directory), sorter_(sorter_options(options), spill_), levels_(1) {
  levels_[0].num_nodes = 1;
  levels_[0].label_low.push<uint16_t>(0);
  path_terminal_.assign(1, 0);
}

void IndexBuilder::add(const uint32_t* tokens, uint32_t length, uint64_t value, uint64_t place) {
  ++counts_.num_keys_read;
  const KeyRef key{tokens, length, value, place};
  if (!options_.is_sorted)
    sorter_.add(key);
  else
    take_sorted(key);
}

void IndexBuilder::finish(const KeySorter::Poll& poll) {
  if (!options_.is_sorted) {
    sorter_.drain([this](const KeyRef& key) { take_sorted(key); }, poll);
    counts_.num_runs = sorter_.num_runs();
    counts_.spilled_bytes = sorter_.spilled_bytes();
  }
  if (has_pending_) settle();
  // Close every node that is still open, the deepest first; the root's bits end level 0.
  for (size_t depth = path_.size() + 1; depth-- > 0;) close_node(depth);
  counts_.depth = levels_.size() - 1;

  uint64_t total = counts_.num_nodes - 1;
  double bits = 0;
  auto add_term = [&](uint64_t count) {
    if (count > 0) bits -= double(count) * std::log2(double(count) / double(total));
  };
  for (uint64_t count : label_counts_) add_term(count);
  for (const auto& entry : rare_label_counts_) add_term(entry.second);
  counts_.label_entropy = total > 0 ? bits / double(total) : 0;
  for (counts_.high_width = 0; (largest_label_ >> 16) >> counts_.high_width;) ++counts_.high_width;
}

BuildCounts IndexBuilder::counts() const { return counts_; }

void IndexBuilder::take_sorted(const KeyRef& key) {
  if (has_pending_) {
    const int order =
        compare_keys(pending_.data(), static_cast<uint32_t>(pending_.size()), key.tokens, key.length);
    if (order > 0)
      throw KeyConflict("keys are not in ascending order", pending_place_, key.place,
                        std::vector<uint32_t>(key.tokens, key.tokens + key.length));
    if (order == 0) {
      ++counts_.num_duplicates;
      if (options_.duplicates == Duplicates::kError)
        throw KeyConflict("the same key stands twice", pending_place_, key.place, pending_);
      pending_place_ = key.place;
      combine(key.value);
      return;
    }
    settle();
  }
  pending_.assign(key.tokens, key.tokens + key.length);
  pending_values_.assign(1, key.value);
  pending_place_ = key.place;
  has_pending_ = true;
}

void IndexBuilder::combine(uint64_t value) {
  uint64_t& kept = pending_values_[0];
  const bool is_float = options_.value_kind == ValueKind::kFloat;
  switch (options_.duplicates) {
    case Duplicates::kFirst:
    case Duplicates::kError:
      return;
    case Duplicates::kLast:
      kept = value;
      return;
    case Duplicates::kMin:
      if (is_float ? as_float(value) < as_float(kept) : value < kept) kept = value;
      return;
    case Duplicates::kMax:
      if (is_float ? as_float(value) > as_float(kept) : value > kept) kept = value;
      return;
    case Duplicates::kSum:
      if (is_float) {
        kept = as_bits(as_float(kept) + as_float(value));
      } else if (kept + value < kept) {
        throw KeyConflict("the values of a key add up to more than 64 bits hold", pending_place_, pending_place_,
                          pending_);
      } else {
        kept += value;
      }
      return;
    case Duplicates::kAll:
      pending_values_.push_back(value);
  }
}

void IndexBuilder::settle() {
  append(pending_);
  if (options_.value_kind == ValueKind::kNone) return;
  Level& level = levels_[pending_.size()];
  for (uint64_t value : pending_values_) level.values.push(value);
  if (options_.duplicates == Duplicates::kAll) level.value_counts.push(static_cast<uint32_t>(pending_values_.size()));
}

// A key shares its first `common` tokens with the one before: the nodes below close, and new ones open.
void IndexBuilder::append(const std::vector<uint32_t>& tokens) {
  size_t common = 0;
  while (common < tokens.size() && common < path_.size() && tokens[common] == path_[common]) ++common;
  for (size_t depth = path_.size(); depth > common; --depth) close_node(depth);
  if (levels_.size() <= tokens.size()) levels_.resize(tokens.size() + 1);
  if (counts_.num_nodes + (tokens.size() - common) > kMaxNodes)
    throw KeyConflict("more than 4,294,967,295 nodes; build several indexes", pending_place_, pending_place_, tokens);
  path_terminal_.resize(tokens.size() + 1);
  if (tokens.empty()) path_terminal_[0] = 1;
  for (size_t depth = common + 1; depth <= tokens.size(); ++depth) {
    const bool has_sibling = depth == common + 1 && path_.size() > common;
    open_node(depth, tokens[depth - 1], has_sibling ? path_[common] : 0, depth == tokens.size());
  }
  counts_.num_nodes += tokens.size() - common;
  counts_.num_tokens += tokens.size();
  ++counts_.num_keys;
  path_ = tokens;
  level_bytes_ += 4 * (tokens.size() - common) + (options_.value_kind != ValueKind::kNone ? 12 : 0);
  if (level_bytes_ > options_.memory / 8) spill_levels();
}

void IndexBuilder::open_node(size_t depth, uint32_t token, uint32_t previous_sibling, bool is_terminal) {
  levels_[depth - 1].louds.push(true);
  Level& level = levels_[depth];
  level.label_low.push(static_cast<uint16_t>(options_.is_compact ? token - previous_sibling : token));
  if (token >> 16) {
    // Flags are kept only from the first high part of a level on; the nodes before had none.
    while (level.high_flags.num_bits() < level.num_nodes) level.high_flags.push(false);
    level.high_flags.push(true);
    level.label_high.push(static_cast<uint16_t>(token >> 16));
    ++counts_.num_highs;
  }
  path_terminal_[depth] = is_terminal;
  if (!options_.is_compact) level.terminal.push(is_terminal);
  ++level.num_nodes;
  count_label(token);
}

// Nodes of a level close in the order in which they opened. The end of the path has no children.
void IndexBuilder::close_node(size_t depth) {
  levels_[depth].louds.push(false);
  const bool is_leaf = depth == path_.size() && depth > 0;
  const bool holds_bit = options_.is_compact ? !is_leaf : depth == 0;
  if (holds_bit) levels_[depth].terminal.push(path_terminal_[depth]);
}

void IndexBuilder::count_label(uint32_t label) {
  largest_label_ = std::max(largest_label_, label);
  if (label >= kDenseLabels) {
    ++rare_label_counts_[label];
    return;
  }
  if (label >= label_counts_.size())
    label_counts_.resize(std::max<size_t>({size_t(label) + 1, std::min<size_t>(2 * label_counts_.size(), kDenseLabels),
                                           1 << 10}));
  ++label_counts_[label];
}

void IndexBuilder::spill_levels() {
  constexpr uint64_t kSmall = 1 << 12;
  auto spill = [this](Stream& stream) {
    if (stream.memory() >= kSmall) stream.spill(spill_);
  };
  for (Level& level : levels_) {
    for (Stream* stream : {&level.label_low, &level.label_high, &level.values, &level.value_counts}) spill(*stream);
    for (BitStream* stream : {&level.high_flags, &level.terminal, &level.louds}) spill(stream->words());
  }
  level_bytes_ = 0;
}

bool IndexBuilder::has(const std::string& section) const {
  if (section == "label_delta" || section == "inner_terminal") return options_.is_compact;
  if (section == "label_low" || section == "terminal") return !options_.is_compact;
  if (section == "label_high" || section == "high_flags") return counts_.high_width > 0;
  if (section == "values") return options_.value_kind != ValueKind::kNone;
  if (section == "value_counts")
    return options_.value_kind != ValueKind::kNone && options_.duplicates == Duplicates::kAll;
  return true;
}

void IndexBuilder::read(const std::string& section, const Chunk& chunk) const {
  Batcher batcher(chunk);
  auto copy = [&](Stream Level::*stream) {
    for (const Level& level : levels_)
      (level.*stream).read(spill_, [&](const uint8_t* data, size_t size) { batcher.put(data, size); });
  };
  if (section == "louds") {
    read_bits(&Level::louds, false, chunk);
  } else if (section == "terminal" || section == "inner_terminal") {
    read_bits(&Level::terminal, false, chunk);
  } else if (section == "high_flags") {
    read_bits(&Level::high_flags, true, chunk);
  } else if (section == "label_low" || section == "label_delta") {
    copy(&Level::label_low);
  } else if (section == "values") {
    copy(&Level::values);
  } else if (section == "value_counts") {
    copy(&Level::value_counts);
  } else if (section == "label_high") {
    BitJoiner joiner(batcher);
    for (const Level& level : levels_)
      level.label_high.read(spill_, [&](const uint8_t* data, size_t size) {
        for (size_t i = 0; i < size; i += 2) {
          uint16_t high;
          memcpy(&high, data + i, 2);
          joiner.put(high, counts_.high_width);
        }
      });
    joiner.finish();
  } else {
    throw std::invalid_argument("no such section: " + section);
  }
  batcher.flush();
}

// The bit strings of all levels end to end. Flags may be shorter than their level: the rest is zero.
void IndexBuilder::read_bits(BitStream Level::*stream, bool pad_to_nodes, const Chunk& chunk) const {
  Batcher batcher(chunk);
  BitJoiner joiner(batcher);
  for (const Level& level : levels_) {
    const BitStream& bits = level.*stream;
    bits.words().read(spill_, [&](const uint8_t* data, size_t size) {
      for (size_t i = 0; i < size; i += 8) {
        uint64_t word;
        memcpy(&word, data + i, 8);
        joiner.put(word, 64);
      }
    });
    if (bits.num_bits() % 64) joiner.put(bits.last_word(), static_cast<int>(bits.num_bits() % 64));
    if (!pad_to_nodes) continue;
    for (uint64_t missing = level.num_nodes - bits.num_bits(); missing > 0;) {
      const int count = static_cast<int>(std::min<uint64_t>(missing, 64));
      joiner.put(0, count);
      missing -= count;
    }
  }
  joiner.finish();
  batcher.flush();
}

}  // namespace flashtrie
