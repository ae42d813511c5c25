#include "temp_file.hpp"

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <unistd.h>

namespace flashtrie {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

TempFile::~TempFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

uint64_t TempFile::append(const void* data, size_t size) {
  if (descriptor_ < 0) {
    std::string name = directory_ + "/.flashtrie-XXXXXX";
    descriptor_ = mkstemp(name.data());
    if (descriptor_ < 0) fail("temporary file in " + directory_);
    unlink(name.c_str());
  }
  const uint64_t offset = size_;
  const char* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = pwrite(descriptor_, from, size, static_cast<off_t>(size_));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("temporary file in " + directory_);
    from += written;
    size -= static_cast<size_t>(written);
    size_ += static_cast<uint64_t>(written);
  }
  return offset;
}

void TempFile::read(uint64_t offset, void* data, size_t size) const {
  char* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t got = pread(descriptor_, to, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = EIO;
    if (got <= 0) fail("temporary file in " + directory_);
    to += got;
    size -= static_cast<size_t>(got);
    offset += static_cast<uint64_t>(got);
  }
}

}  // namespace flashtrie
