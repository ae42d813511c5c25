#include "index_builder.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace flashtrie {
namespace {

constexpr uint32_t kDenseLabels = 1u << 22;
constexpr uint64_t kMaxNodes = 0xffffffffull;

SorterOptions sorter_options(const BuilderOptions& options) {
  SorterOptions sorter;
  sorter.memory = options.memory / 8 * (options.tails == Tails::kOff ? 7 : 5);
  sorter.num_threads = options.num_threads;
  sorter.has_values = options.value_kind != ValueKind::kNone;
  // Only these rules can find fault with a key once it is sorted.
  sorter.has_places = options.duplicates == Duplicates::kError || options.duplicates == Duplicates::kSum;
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

// Of eight parts of the cap one is for the levels; with tails two more are for sorting those.
uint64_t tails_memory(const BuilderOptions& options) { return options.memory / 8 * 2; }

}  // namespace

IndexBuilder::IndexBuilder(const BuilderOptions& options) : options_(options), spill_(options.temp_directory) {
  if (!options.is_sorted) sorter_.emplace(sorter_options(options), spill_);
  if (options.tails != Tails::kOn) shown_ = &whole_.emplace(options.is_compact, spill_);
  if (options.tails == Tails::kOff) return;
  cut_.emplace(options.is_compact, spill_);
  tails_.emplace(tails_memory(options), options.num_threads, spill_);
  if (!whole_) shown_ = &*cut_;
}

void IndexBuilder::add(const uint32_t* tokens, uint32_t length, uint64_t value, uint64_t place) {
  ++counts_.num_keys_read;
  const KeyRef key{tokens, length, value, place};
  if (sorter_)
    sorter_->add(key);
  else
    take_sorted(key);
}

void IndexBuilder::finish(const KeySorter::Poll& poll) {
  if (sorter_) {
    sorter_->drain([this](const KeyRef& key) { take_sorted(key); }, poll);
    counts_.num_runs = sorter_->num_runs();
    counts_.spilled_bytes = sorter_->spilled_bytes();
    sorter_.reset();
  }
  if (has_pending_) settle(0);
  if (whole_) whole_->finish();
  if (cut_) cut_->finish();
  if (tails_) {
    tails_->finish(poll);
    counts_.tails = tails_->counts();
  }

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
    const size_t shorter = std::min<size_t>(pending_.size(), key.length);
    size_t common = 0;
    while (common < shorter && pending_[common] == key.tokens[common]) ++common;
    if (common < shorter ? pending_[common] > key.tokens[common] : pending_.size() > key.length)
      throw KeyConflict("keys are not in ascending order", pending_place_, key.place,
                        std::vector<uint32_t>(key.tokens, key.tokens + key.length));
    if (pending_.size() == key.length && common == key.length) {
      ++counts_.num_duplicates;
      if (options_.duplicates == Duplicates::kError)
        throw KeyConflict("the same key stands twice", pending_place_, key.place, pending_);
      pending_place_ = key.place;
      combine(key.value);
      return;
    }
    settle(common);
    common_ = common;
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
        const double sum = as_float(kept) + as_float(value);
        if (!std::isfinite(sum))
          throw KeyConflict("the values of a key add up to more than a float holds", pending_place_, pending_place_,
                            pending_);
        kept = as_bits(sum);
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

void IndexBuilder::settle(size_t common_next) {
  const size_t length = pending_.size(), added = length - common_;
  if (counts_.num_nodes + added > kMaxNodes)
    throw KeyConflict("more than 4,294,967,295 nodes; build several indexes", pending_place_, pending_place_, pending_);
  for (size_t depth = common_; depth < length; ++depth) count_label(pending_[depth]);
  counts_.num_nodes += added;
  counts_.num_tokens += length;
  counts_.depth = std::max<uint64_t>(counts_.depth, length);
  ++counts_.num_keys;
  if (whole_) {
    whole_->append(pending_, common_, length);
    level_bytes_ += 4 * added;
  }
  if (cut_) {
    // The first node that leads to this key alone; what lies below it is the tail, if it is long enough.
    const size_t head = std::max(common_, common_next) + 1;
    const size_t end = length >= head + kMinTail ? head : length;
    cut_->append(pending_, common_, end);
    level_bytes_ += 4 * (end - common_);
    if (end < length)
      tails_->add(pending_.data() + end, static_cast<uint32_t>(length - end), static_cast<uint32_t>(end),
                  cut_->num_links(end) - 1);
  }
  if (options_.value_kind != ValueKind::kNone) {
    if (values_.size() <= length) values_.resize(length + 1);
    for (uint64_t value : pending_values_) values_[length].values.push(value);
    if (options_.duplicates == Duplicates::kAll)
      values_[length].counts.push(static_cast<uint32_t>(pending_values_.size()));
    level_bytes_ += 12;
  }
  if (level_bytes_ > options_.memory / 8) spill_levels();
}

void IndexBuilder::count_label(uint32_t label) {
  largest_label_ = std::max(largest_label_, label);
  counts_.num_highs += label >> 16 > 0;
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
  for (std::optional<TrieLayout>* layout : {&whole_, &cut_})
    if (*layout) (*layout)->spill(spill_);
  for (LevelValues& level : values_)
    for (Stream* stream : {&level.values, &level.counts})
      if (stream->memory() >= kSmall) stream->spill(spill_);
  level_bytes_ = 0;
}

void IndexBuilder::use_tails(bool cut) {
  const std::optional<TrieLayout>& wanted = cut ? cut_ : whole_;
  if (!wanted) throw std::invalid_argument("the trie was not laid out this way");
  shown_ = &*wanted;
}

bool IndexBuilder::has(const std::string& section) const {
  const bool has_tails = cut_ && shown_ == &*cut_ && counts_.tails.num_links > 0;
  if (section == "label_delta" || section == "inner_terminal") return options_.is_compact;
  if (section == "label_low" || section == "terminal") return !options_.is_compact;
  if (section == "label_high" || section == "high_flags") return counts_.high_width > 0;
  if (section == "link_flags" || section.rfind("tail_", 0) == 0) return has_tails;
  if (section == "values") return options_.value_kind != ValueKind::kNone;
  if (section == "value_counts")
    return options_.value_kind != ValueKind::kNone && options_.duplicates == Duplicates::kAll;
  return true;
}

void IndexBuilder::read(const std::string& section, const Chunk& chunk) const {
  if (section == "values" || section == "value_counts") {
    Batcher batcher(chunk);
    for (const LevelValues& level : values_)
      (section == "values" ? level.values : level.counts).read(spill_, [&](const uint8_t* data, size_t size) {
        batcher.put(data, size);
      });
    batcher.flush();
  } else if (!shown_->read(section, counts_.high_width, chunk) && !(tails_ && tails_->read(section, chunk))) {
    throw std::invalid_argument("no such section: " + section);
  }
}

}  // namespace flashtrie
