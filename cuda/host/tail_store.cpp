#include "tail_store.hpp"

#include <algorithm>
#include <cstring>

namespace flashtrie {
namespace {

// Above every label; put behind a reversed tail it sorts a tail behind those that it ends.
constexpr uint32_t kAfterAll = 1u << 31;

SorterOptions sorter_options(uint64_t memory, int num_threads) {
  SorterOptions options;
  options.memory = memory;
  options.num_threads = num_threads;
  options.has_values = true;
  return options;
}

}  // namespace

TailStore::TailStore(uint64_t memory, int num_threads, TempFile& spill)
    : memory_(memory),
      num_threads_(num_threads),
      spill_(spill),
      sorter_(new KeySorter(sorter_options(memory, num_threads), spill)) {}

void TailStore::add(const uint32_t* labels, uint32_t length, uint32_t level, uint64_t number) {
  turned_.assign(std::make_reverse_iterator(labels + length), std::make_reverse_iterator(labels));
  largest_ = std::max(largest_, *std::max_element(turned_.begin(), turned_.end()));
  turned_.push_back(kAfterAll);
  sorter_->add({turned_.data(), length + 1, uint64_t(level) << 32 | number, 0});  // fewer than 2^32 nodes a level
  ++counts_.num_links;
  counts_.num_nodes += length;
}

void TailStore::finish(const KeySorter::Poll& poll) {
  counts_.label_size = largest_ < 1u << 8 ? 1 : largest_ < 1u << 16 ? 2 : 4;
  KeySorter places(sorter_options(memory_, num_threads_), spill_);
  sorter_->drain([&](const KeyRef& turned) { store(turned, places); }, poll);
  sorter_.reset();
  places.drain(
      [this](const KeyRef& link) {
        places_.push(static_cast<uint32_t>(link.value));
        spill();
      },
      poll);
}

// Longer tails come before those that end them, so one look at the last one stored tells whether this lies there already.
void TailStore::store(const KeyRef& turned, KeySorter& places) {
  const uint32_t length = turned.length - 1;
  const bool is_inside = length <= last_.size() && std::equal(turned.tokens, turned.tokens + length, last_.begin());
  if (!is_inside) {
    last_.assign(turned.tokens, turned.tokens + length);
    for (uint32_t i = length; i-- > 0;) {
      labels_.push(turned.tokens[i]);
      ends_.push(i == 0);
    }
    counts_.num_labels += length;
    spill();
  }
  const uint32_t link[2] = {static_cast<uint32_t>(turned.value >> 32), static_cast<uint32_t>(turned.value)};
  places.add({link, 2, counts_.num_labels - length, 0});
}

void TailStore::spill() {
  for (Stream* stream : {&labels_, &ends_.words(), &places_})
    if (stream->memory() > memory_ / 8) stream->spill(spill_);
}

bool TailStore::read(const std::string& section, const Chunk& chunk) const {
  Batcher batcher(chunk);
  BitJoiner joiner(batcher);
  const auto numbers = [this](const Stream& stream, auto&& take) {
    stream.read(spill_, [&](const uint8_t* data, size_t size) {
      for (size_t at = 0; at < size; at += 4) {
        uint32_t number;
        memcpy(&number, data + at, 4);
        take(number);
      }
    });
  };
  if (section == "tail_ends") {
    ends_.read(spill_, joiner);
  } else if (section == "tail_labels") {
    numbers(labels_, [&](uint32_t label) { batcher.put(&label, counts_.label_size); });
  } else if (section == "tail_links") {
    int width = 1;
    while (((counts_.num_labels - 1) >> width) > 0) ++width;
    numbers(places_, [&](uint32_t place) { joiner.put(place, width); });
  } else {
    return false;
  }
  joiner.finish();
  batcher.flush();
  return true;
}

}  // namespace flashtrie
