#include "key_sorter.hpp"

#include <algorithm>
#include <cstring>
#include <queue>

#include "threads.hpp"
#include "varint.hpp"

namespace flashtrie {

// 16 bytes, so that most comparisons never leave the record: the first two tokens, each plus one so that an
// absent token sorts first, then where the rest is.
struct KeySorter::Record {
  uint64_t prefix;
  uint32_t offset;  // of the key's header in the arena; ascending in input order
  uint32_t length;
};

namespace {

constexpr uint64_t kRunBufferBytes = 1 << 18;
constexpr uint64_t kMaxArenaWords = 0xffffffffull;
constexpr uint64_t kPollEvery = 1 << 16;
constexpr int kBucketBits = 12;
constexpr uint64_t kRecordCost = 32;  // a record, and as much again while it is scattered

uint64_t prefix_of(const uint32_t* tokens, uint32_t length) {
  const uint64_t first = length > 0 ? uint64_t(tokens[0]) + 1 : 0;
  const uint64_t second = length > 1 ? uint64_t(tokens[1]) + 1 : 0;
  return (first << 32) | second;
}

}  // namespace

int compare_keys(const uint32_t* a, uint32_t a_length, const uint32_t* b, uint32_t b_length) {
  const uint32_t common = std::min(a_length, b_length);
  for (uint32_t i = 0; i < common; ++i)
    if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
  return a_length == b_length ? 0 : (a_length < b_length ? -1 : 1);
}

KeySorter::KeySorter(const SorterOptions& options, TempFile& spill) : options_(options), spill_(spill) {
  header_words_ = (options.has_values ? 2 : 0) + (options.has_places ? 2 : 0);
  // Both could fill the cap alone; pages that are never touched cost nothing.
  arena_capacity_ = std::clamp<uint64_t>(options.memory / sizeof(uint32_t), 1 << 10, kMaxArenaWords);
  arena_.reset(new uint32_t[arena_capacity_]);
  records_.reserve(std::max<uint64_t>(options.memory / kRecordCost, 64));
}

KeySorter::~KeySorter() = default;

KeyRef KeySorter::at(const Record& record) const {
  const uint32_t* words = arena_.get() + record.offset;
  KeyRef key;
  if (options_.has_values) {
    memcpy(&key.value, words, 8);
    words += 2;
  }
  if (options_.has_places) {
    memcpy(&key.place, words, 8);
    words += 2;
  }
  key.tokens = words;
  key.length = record.length;
  return key;
}

void KeySorter::add(const KeyRef& key) {
  const uint64_t words = header_words_ + uint64_t(key.length);
  const uint64_t bytes = (arena_size_ + words) * sizeof(uint32_t) + (records_.size() + 1) * kRecordCost;
  if (!records_.empty() && (bytes > options_.memory || arena_size_ + words > arena_capacity_)) spill_chunk();
  if (words > arena_capacity_) {  // one key longer than the cap: rather grow than refuse
    arena_capacity_ = words;
    arena_.reset(new uint32_t[arena_capacity_]);
  }
  uint32_t* to = arena_.get() + arena_size_;
  if (options_.has_values) {
    memcpy(to, &key.value, 8);
    to += 2;
  }
  if (options_.has_places) {
    memcpy(to, &key.place, 8);
    to += 2;
  }
  std::copy_n(key.tokens, key.length, to);
  records_.push_back({prefix_of(key.tokens, key.length), static_cast<uint32_t>(arena_size_), key.length});
  arena_size_ += words;
}

// Scatter by the leading bits of the first token, then sort the buckets, each by one thread.
void KeySorter::sort_chunk() {
  const uint32_t* arena = arena_.get() + header_words_;
  auto less = [arena](const Record& a, const Record& b) {
    if (a.prefix != b.prefix) return a.prefix < b.prefix;
    if (a.length > 2 && b.length > 2) {
      const int order = compare_keys(arena + a.offset + 2, a.length - 2, arena + b.offset + 2, b.length - 2);
      if (order != 0) return order < 0;
    } else if (a.length != b.length) {
      return a.length < b.length;
    }
    return a.offset < b.offset;
  };
  uint64_t largest = 0;
  for (const Record& record : records_) largest = std::max(largest, record.prefix >> 32);
  int shift = 0;
  while ((largest >> shift) >= (uint64_t(1) << kBucketBits)) ++shift;

  std::vector<uint64_t> starts((1 << kBucketBits) + 1, 0);
  auto bucket = [shift](const Record& record) { return record.prefix >> 32 >> shift; };
  for (const Record& record : records_) ++starts[bucket(record) + 1];
  for (size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
  scratch_.resize(records_.size());
  {
    std::vector<uint64_t> next(starts.begin(), starts.end() - 1);
    for (const Record& record : records_) scratch_[next[bucket(record)]++] = record;
  }
  records_.swap(scratch_);
  parallel_for(1 << kBucketBits, 16, options_.num_threads, [&](int, uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i)
      std::sort(records_.begin() + starts[i], records_.begin() + starts[i + 1], less);
  });
}

void KeySorter::spill_chunk() {
  if (records_.empty()) return;
  sort_chunk();
  Run run{spill_.size(), 0};
  std::vector<uint8_t> buffer;
  buffer.reserve(kRunBufferBytes + (1 << 16));
  KeyRef previous;
  for (const Record& record : records_) {
    const KeyRef key = at(record);
    uint32_t common = 0;
    while (common < previous.length && common < key.length && previous.tokens[common] == key.tokens[common]) ++common;
    put_varint(buffer, common);
    put_varint(buffer, key.length - common);
    for (uint32_t i = common; i < key.length; ++i) put_varint(buffer, key.tokens[i]);
    if (options_.has_values) put_varint(buffer, key.value);
    if (options_.has_places) put_varint(buffer, key.place);
    previous = key;
    if (buffer.size() >= kRunBufferBytes) {
      spill_.append(buffer.data(), buffer.size());
      buffer.clear();
    }
  }
  if (!buffer.empty()) spill_.append(buffer.data(), buffer.size());
  run.size = spill_.size() - run.offset;
  spilled_bytes_ += run.size;
  runs_.push_back(run);
  records_.clear();
  arena_size_ = 0;
}

// A sorted source of keys. `next` says whether there is one; `key` is valid until the next call.
class KeySorter::Cursor {
 public:
  virtual ~Cursor() = default;
  virtual bool next() = 0;
  KeyRef key;
};

class KeySorter::MemoryCursor final : public Cursor {
 public:
  explicit MemoryCursor(const KeySorter& sorter) : sorter_(sorter) {}
  bool next() override {
    if (at_ == sorter_.records_.size()) return false;
    key = sorter_.at(sorter_.records_[at_++]);
    return true;
  }

 private:
  const KeySorter& sorter_;
  size_t at_ = 0;
};

class KeySorter::RunCursor final : public Cursor {
 public:
  RunCursor(const KeySorter& sorter, Run run, size_t buffer_bytes)
      : options_(sorter.options_), bytes_(sorter.spill_, run.offset, run.size, buffer_bytes) {}
  bool next() override {
    if (bytes_.done()) return false;
    const uint32_t common = static_cast<uint32_t>(bytes_.varint());
    const uint32_t rest = static_cast<uint32_t>(bytes_.varint());
    tokens_.resize(common + uint64_t(rest));
    for (uint32_t i = 0; i < rest; ++i) tokens_[common + i] = static_cast<uint32_t>(bytes_.varint());
    if (options_.has_values) key.value = bytes_.varint();
    if (options_.has_places) key.place = bytes_.varint();
    key.tokens = tokens_.data();
    key.length = common + rest;
    return true;
  }

 private:
  const SorterOptions& options_;
  VarintReader bytes_;
  std::vector<uint32_t> tokens_;
};

void KeySorter::drain(const Sink& sink, const Poll& poll) {
  sort_chunk();
  scratch_ = {};
  if (runs_.empty()) {
    MemoryCursor cursor(*this);
    for (uint64_t count = 1; cursor.next(); ++count) {
      sink(cursor.key);
      if (count % kPollEvery == 0) poll();
    }
    return;
  }
  const size_t buffer_bytes = std::clamp<uint64_t>(options_.memory / 8 / runs_.size(), 1 << 12, kRunBufferBytes);
  std::vector<std::unique_ptr<Cursor>> cursors;
  for (const Run& run : runs_) cursors.push_back(std::make_unique<RunCursor>(*this, run, buffer_bytes));
  cursors.push_back(std::make_unique<MemoryCursor>(*this));  // read last, so it also comes last among equals
  struct Entry {
    uint64_t prefix;
    size_t source;
  };
  auto later = [&](const Entry& a, const Entry& b) {
    if (a.prefix != b.prefix) return a.prefix > b.prefix;
    const KeyRef &x = cursors[a.source]->key, &y = cursors[b.source]->key;
    const int order = compare_keys(x.tokens, x.length, y.tokens, y.length);
    return order != 0 ? order > 0 : a.source > b.source;
  };
  std::priority_queue<Entry, std::vector<Entry>, decltype(later)> heap(later);
  auto push = [&](size_t source) {
    if (cursors[source]->next()) {
      const KeyRef& key = cursors[source]->key;
      heap.push({prefix_of(key.tokens, key.length), source});
    }
  };
  for (size_t source = 0; source < cursors.size(); ++source) push(source);
  for (uint64_t count = 1; !heap.empty(); ++count) {
    const size_t source = heap.top().source;
    heap.pop();
    sink(cursors[source]->key);
    push(source);
    if (count % kPollEvery == 0) poll();
  }
}

}  // namespace flashtrie
