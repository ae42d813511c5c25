// Parsers of key text: blocks of whole lines in, flat tokens out. They report what is wrong with a
// line as a code and a place in the block; the sentence a user reads is made in one place, in Python
// (flashtrie_cli/keys/parsing.py), which also holds the slow twins of these functions.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <string_view>

namespace flashtrie {

constexpr uint32_t kMaxInputToken = 0x7fffffffu;
constexpr uint32_t kUnknownToken = 0xffffffffu;
constexpr int64_t kMaxKeyTokens = 65535;

// A growing array of plain numbers that, unlike std::vector, touches no memory before it is written.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { free(data_); }

  // Room for `extra` more; the pointer returned is where the next one goes (see `set_end`).
  T* room(size_t extra) {
    if (capacity_ - size_ < extra) grow(size_ + extra);
    return data_ + size_;
  }
  void set_end(const T* end) { size_ = static_cast<size_t>(end - data_); }
  void push_back(T value) {
    *room(1) = value;
    ++size_;
  }
  void truncate(size_t size) { size_ = size; }
  size_t size() const { return size_; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

  // Hands over the memory (to be freed with `free`), cut to what is used.
  T* release() {
    T* kept = size_ > 0 ? static_cast<T*>(realloc(data_, size_ * sizeof(T))) : nullptr;
    if (kept == nullptr) kept = data_;
    data_ = nullptr;
    size_ = capacity_ = 0;
    return kept;
  }

 private:
  void grow(size_t wanted) {
    size_t capacity = capacity_ + capacity_ / 2 + 64;
    if (capacity < wanted) capacity = wanted;
    T* grown = static_cast<T*>(realloc(data_, capacity * sizeof(T)));
    if (grown == nullptr) throw std::bad_alloc();
    data_ = grown;
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

// What can be wrong with a line; the values are known to parsing.py.
enum class LineFault : int32_t {
  none = 0,
  bad_token = 1,        // begin..end: the word that is no decimal number
  token_too_large = 2,  // begin..end: the number above 2^31 - 1
  too_deep = 3,         // more than kMaxKeyTokens tokens
  missing_column = 4,   // the line has too few columns
  bad_value = 5,        // begin..end: the column that is no finite number
  value_too_large = 6,  // begin..end: an integer of 2^64 or more
  invalid_utf8 = 7,     // begin: the byte at which decoding fails
};

// Keys of one block of lines, in order; `offsets` starts with 0.
struct ParsedLines {
  Buffer<uint32_t> tokens;
  Buffer<int64_t> offsets;
  Buffer<int64_t> lines;          // line number of each key
  Buffer<uint64_t> int_values;    // while every value so far was an unsigned integer
  Buffer<double> float_values;    // from the first other number on: all of them
  bool has_floats = false;
  int64_t num_lines = 0;
  int64_t num_empty = 0;          // lines without a token: no key
  LineFault fault = LineFault::none;
  int64_t fault_line = 0;
  int64_t fault_begin = 0, fault_end = 0;  // byte range within the block
};

struct LineFormat {
  int64_t first_line = 1;   // number of the block's first line
  int value_column = 0;     // 1-based, of TAB separated ones; 0: no values, and the whole line is the key
  bool float_values = false;  // an earlier block of the same input had a value that is no unsigned integer
};

// Decimal token ids separated by blanks (spaces and, without values, tabs).
void parse_ids(std::string_view block, const LineFormat& format, ParsedLines& out);

}  // namespace flashtrie
