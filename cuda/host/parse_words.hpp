// Words to token ids: a hash table over an arena of strings, ids in order of first sight.
#pragma once
#include <vector>

#include "parse.hpp"

namespace flashtrie {

class WordTable {
 public:
  WordTable();

  size_t num_words() const { return num_words_; }
  std::string_view word(uint32_t id) const {
    return {arena_.data() + starts_[id], static_cast<size_t>(starts_[id + 1] - starts_[id])};
  }

  // The id of a word; kUnknownToken where it is not in the table.
  uint32_t find(std::string_view word) const;
  // The id of a word, which is added where it is new.
  uint32_t add(std::string_view word);

  // Lines of UTF-8 split at Unicode white space. With `grow`, new words are added; without it they
  // become kUnknownToken.
  void parse(std::string_view block, const LineFormat& format, bool grow, ParsedLines& out);

  // Ids in byte order of their words.
  std::vector<uint32_t> sorted_ids() const;

 private:
  // 16 bytes, four to a cache line. Words of up to 8 bytes are told apart by the slot alone, which
  // saves the second cache miss for most words of most languages.
  struct Slot {
    uint64_t head;  // the first 8 bytes, zeros behind a shorter word
    uint32_t tag;   // kHashBits of the hash, then the length up to kLongWord
    uint32_t id;    // kUnknownToken: empty
  };
  struct Probe {
    const char* data;
    size_t size;
    uint64_t head;
    uint32_t tag;
  };
  static constexpr int kHashBits = 28;
  static constexpr uint32_t kLongWord = 15;

  static Probe make_probe(std::string_view word);
  // Where the search for a tag starts: the top bits of its hash. Slots thus stand in the order of their
  // tags, so that growing reads and writes memory in order and needs no word. Past 2^kHashBits slots
  // only every other one is a start, which linear probing bears.
  size_t start_of(uint32_t tag) const {
    const uint64_t hash = tag >> 4;
    return static_cast<size_t>(shift_ >= 0 ? hash >> shift_ : hash << -shift_);
  }
  bool matches(const Slot& slot, const Probe& probe) const;
  uint32_t resolve(const Probe& probe) const;
  uint32_t resolve_or_add(const Probe& probe);
  void grow();

  Buffer<char> arena_;
  Buffer<uint64_t> starts_;  // num_words + 1
  std::vector<Slot> slots_;
  size_t num_words_ = 0;
  int shift_;  // kHashBits - log2 of the number of slots

  friend class WordParser;
};

// First word that breaks the rules of a stored vocabulary (strictly ascending byte order, valid UTF-8,
// not empty, no white space), or -1. `offsets` has num_words + 1 entries, already known to ascend.
int64_t first_bad_word(std::string_view text, const int64_t* offsets, size_t num_words);

}  // namespace flashtrie
