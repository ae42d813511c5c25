#include "parse_words.hpp"

#include <algorithm>
#include <stdexcept>

#include "parse_lines.hpp"
#include "utf8.hpp"

namespace flashtrie {
namespace {

constexpr int kFirstSlotBits = 10;
constexpr uint64_t kMix1 = 0x9e3779b97f4a7c15ull;  // golden ratio
constexpr uint64_t kMix2 = 0xd6e8feb86659fd93ull;

uint64_t mix(uint64_t a, uint64_t b) {
  a = (a ^ (a >> 32)) * kMix2;
  a ^= b;
  a *= kMix1;
  return a ^ (a >> 29);
}

uint64_t load_partial(const char* data, size_t size) {
  uint64_t value = 0;
  memcpy(&value, data, size < 8 ? size : 8);
  return value;
}

// Prefixes as big-endian numbers order like the strings do, so most comparisons need no memory.
uint64_t order_prefix(std::string_view word) {
  uint64_t value = 0;
  for (size_t i = 0; i < 8; ++i) value = value << 8 | (i < word.size() ? static_cast<unsigned char>(word[i]) : 0u);
  return value;
}

}  // namespace

WordTable::WordTable() : slots_(1 << kFirstSlotBits, Slot{0, 0, kUnknownToken}), shift_(kHashBits - kFirstSlotBits) {
  starts_.push_back(0);
}

WordTable::Probe WordTable::make_probe(std::string_view word) {
  const uint64_t head = load_partial(word.data(), word.size());
  uint64_t hash = mix(head, word.size() * kMix1);
  for (size_t i = 8; i < word.size(); i += 8) hash = mix(hash, load_partial(word.data() + i, word.size() - i));
  const uint32_t length = word.size() < kLongWord ? static_cast<uint32_t>(word.size()) : kLongWord;
  return {word.data(), word.size(), head, (static_cast<uint32_t>(mix(hash, kMix2) >> 32) & ~15u) | length};
}

bool WordTable::matches(const Slot& slot, const Probe& probe) const {
  if (slot.tag != probe.tag || slot.head != probe.head) return false;
  return probe.size <= 8 || word(slot.id) == std::string_view(probe.data, probe.size);
}

uint32_t WordTable::resolve(const Probe& probe) const {
  const size_t mask = slots_.size() - 1;
  for (size_t at = start_of(probe.tag);; at = (at + 1) & mask) {
    const Slot& slot = slots_[at];
    if (slot.id == kUnknownToken || matches(slot, probe)) return slot.id;
  }
}

uint32_t WordTable::resolve_or_add(const Probe& probe) {
  const size_t mask = slots_.size() - 1;
  size_t at = start_of(probe.tag);
  for (; slots_[at].id != kUnknownToken; at = (at + 1) & mask) {
    if (matches(slots_[at], probe)) return slots_[at].id;
  }
  if (num_words_ > kMaxInputToken) throw std::length_error("more than 2^31 different words");
  const uint32_t id = static_cast<uint32_t>(num_words_++);
  slots_[at] = {probe.head, probe.tag, id};
  char* room = arena_.room(probe.size);
  if (probe.size > 0) memcpy(room, probe.data, probe.size);
  arena_.set_end(room + probe.size);
  starts_.push_back(arena_.size());
  if (num_words_ * 5 > slots_.size() * 3) grow();
  return id;
}

void WordTable::grow() {
  std::vector<Slot> grown(slots_.size() * 2, Slot{0, 0, kUnknownToken});
  const size_t mask = grown.size() - 1;
  --shift_;
  for (const Slot& slot : slots_) {
    if (slot.id == kUnknownToken) continue;
    size_t at = start_of(slot.tag);
    while (grown[at].id != kUnknownToken) at = (at + 1) & mask;
    grown[at] = slot;
  }
  slots_.swap(grown);
}

uint32_t WordTable::find(std::string_view word) const { return resolve(make_probe(word)); }
uint32_t WordTable::add(std::string_view word) { return resolve_or_add(make_probe(word)); }

std::vector<uint32_t> WordTable::sorted_ids() const {
  struct Entry {
    uint64_t prefix;
    uint32_t id;
  };
  std::vector<Entry> entries(num_words_);
  for (uint32_t id = 0; id < num_words_; ++id) entries[id] = {order_prefix(word(id)), id};
  std::sort(entries.begin(), entries.end(), [this](const Entry& a, const Entry& b) {
    return a.prefix != b.prefix ? a.prefix < b.prefix : word(a.id) < word(b.id);
  });
  std::vector<uint32_t> ids(num_words_);
  for (size_t i = 0; i < num_words_; ++i) ids[i] = entries[i].id;
  return ids;
}

// Splits lines and looks words up one window later than it hashes them, so that the cache misses of
// a window's slots overlap.
class WordParser {
 public:
  WordParser(WordTable& table, bool grow, ParsedLines& out) : table_(table), grow_(grow), out_(out) {}

  Fault parse_key(std::string_view line) {
    const auto* at = reinterpret_cast<const unsigned char*>(line.data());
    const auto* const end = at + line.size();
    const size_t first = out_.tokens.size();
    uint32_t* next = out_.tokens.room(line.size() / 2 + 1);
    const unsigned char* begin = nullptr;  // of the current word
    auto finish_word = [&] {
      if (begin == nullptr) return;
      queue({reinterpret_cast<const char*>(begin), static_cast<size_t>(at - begin)}, out_.tokens.size());
      out_.tokens.set_end(++next);
      begin = nullptr;
    };
    while (at < end) {
      if (*at < 0x80) {
        if (!is_ascii_space(*at)) {
          if (begin == nullptr) begin = at;
        } else {
          finish_word();
        }
        ++at;
        continue;
      }
      uint32_t code_point;
      const int size = decode_utf8(at, end, code_point);
      if (size == 0) {
        const char* bad = reinterpret_cast<const char*>(at);
        return {LineFault::invalid_utf8, bad, bad + 1};
      }
      if (!is_unicode_space(code_point)) {
        if (begin == nullptr) begin = at;
      } else {
        finish_word();
      }
      at += size;
    }
    finish_word();
    if (out_.tokens.size() - first > static_cast<size_t>(kMaxKeyTokens))
      return {LineFault::too_deep, line.data(), line.data() + line.size()};
    return {};
  }

  void flush() {
    for (int i = 0; i < num_queued_; ++i) {
      const WordTable::Probe& probe = queued_[i];
      out_.tokens[places_[i]] = grow_ ? table_.resolve_or_add(probe) : table_.resolve(probe);
    }
    num_queued_ = 0;
  }

 private:
  void queue(std::string_view word, size_t place) {
    const WordTable::Probe probe = WordTable::make_probe(word);
    __builtin_prefetch(&table_.slots_[table_.start_of(probe.tag)]);
    queued_[num_queued_] = probe;
    places_[num_queued_] = place;
    if (++num_queued_ == kWindow) flush();
  }

  static constexpr int kWindow = 32;  // about what the line fill buffers of two cores can hold
  WordTable& table_;
  const bool grow_;
  ParsedLines& out_;
  WordTable::Probe queued_[kWindow];
  size_t places_[kWindow];
  int num_queued_ = 0;
};

void WordTable::parse(std::string_view block, const LineFormat& format, bool grow, ParsedLines& out) {
  out.tokens.room(block.size() / 6 + 16);
  WordParser parser(*this, grow, out);
  parse_lines(block, format, out, [&](std::string_view key) { return parser.parse_key(key); });
  parser.flush();
}

int64_t first_bad_word(std::string_view text, const int64_t* offsets, size_t num_words) {
  std::string_view previous;
  for (size_t i = 0; i < num_words; ++i) {
    const auto word = text.substr(static_cast<size_t>(offsets[i]), static_cast<size_t>(offsets[i + 1] - offsets[i]));
    if (word.empty() || (i > 0 && !(previous < word))) return static_cast<int64_t>(i);
    const auto* at = reinterpret_cast<const unsigned char*>(word.data());
    const auto* const end = at + word.size();
    while (at < end) {
      uint32_t code_point;
      const int size = decode_utf8(at, end, code_point);
      if (size == 0 || is_unicode_space(code_point)) return static_cast<int64_t>(i);
      at += size;
    }
    previous = word;
  }
  return -1;
}

}  // namespace flashtrie
