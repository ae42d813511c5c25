// An unnamed temporary file for what does not fit the memory cap: nothing is left behind, however we end.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace flashtrie {

class TempFile {
 public:
  // Created at the first append, in `directory`.
  explicit TempFile(std::string directory) : directory_(std::move(directory)) {}
  ~TempFile();
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;

  // Returns the offset at which the bytes begin. Throws std::system_error (disk full and the like).
  uint64_t append(const void* data, size_t size);
  // Reads exactly `size` bytes; may be called from several threads.
  void read(uint64_t offset, void* data, size_t size) const;
  uint64_t size() const { return size_; }

 private:
  std::string directory_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

}  // namespace flashtrie
