#include "masks_plain.hpp"

namespace flashtrie {

uint64_t count_allowed_pairs(const MaskView& masks) {
  uint64_t count = row_word(masks.rows, masks.num_nodes);
  for (uint32_t node = 0; node < masks.num_nodes; ++node)
    count += byte_range(masks, entry_range(masks, node)).count();
  return count;
}

bool make_plain(const MaskView& masks, PlainMasks& made) {
  const uint64_t count = count_allowed_pairs(masks);
  if (count > kEntryBits) return false;
  made.rows.resize((masks.num_nodes + std::size_t(2)) * kRowHalves);
  made.entries.reserve(count);
  made.far_entries.reserve(masks.num_far);
  made.far_targets.assign(masks.far_targets, masks.far_targets + masks.num_far);
  const uint32_t far = far_hop(masks.hop_bits);
  for (uint32_t node = 0; node < masks.num_nodes; ++node) {
    const EntryRange range = entry_range(masks, node);
    ByteRange bytes = byte_range(masks, range);
    const uint32_t first = static_cast<uint32_t>(made.entries.size());
    put_row(made.rows.data(), node, first | (range.terminal ? kTerminalBit : 0), range.count() + bytes.count(), 0);
    const auto next_byte = [&] { return masks.bytes.tokens[bytes.first] << masks.hop_bits | 1; };
    for (uint32_t i = range.first; i < range.last; ++i) {
      const uint32_t entry = masks.entries[i];
      for (; bytes.first < bytes.last && next_byte() < entry; ++bytes.first) made.entries.push_back(next_byte());
      if ((entry & far) == far) made.far_entries.push_back(static_cast<uint32_t>(made.entries.size()));
      made.entries.push_back(entry);
    }
    for (; bytes.first < bytes.last; ++bytes.first) made.entries.push_back(next_byte());
  }
  for (uint32_t end = 0; end < 2; ++end)
    put_row(made.rows.data(), masks.num_nodes + end, static_cast<uint32_t>(made.entries.size()), 0, 0);
  return true;
}

}  // namespace flashtrie
