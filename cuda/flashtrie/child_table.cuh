// The children of wide nodes by parent and label, which only the GPU's search has, made from the trie when it is uploaded. A
// binary search among a thousand children is a dozen reads that wait for one another; this is one, and one of the child.
//
// Buckets of eight node ids, a memory sector each; what finds its bucket full goes into the next one. An entry says neither
// whose child it is nor by which label: the parent's range of children and the child's own label do.
#pragma once
#include "node_tags.cuh"
#include "simt.cuh"

namespace flashtrie {

constexpr uint32_t kBucketPlaces = 8;

struct ChildTable {
  const uint32_t* places;  // kBucketPlaces a bucket, 0 where there is none: the root is nobody's child
  uint32_t num_buckets;
  uint32_t fan_out;        // nodes with at least so many children are in it
};

FT_HD uint32_t child_bucket(uint32_t num_buckets, uint32_t first_child, uint32_t token) {
  uint32_t hash = first_child * 0x9e3779b1u ^ token * 0x85ebca77u;
  hash = (hash ^ hash >> 16) * 0x7feb352du;
  hash = (hash ^ hash >> 15) * 0x846ca68bu;
  hash ^= hash >> 16;
  return static_cast<uint32_t>(static_cast<uint64_t>(hash) * num_buckets >> 32);
}

// What a bucket says of the children of a node.
struct BucketView {
  uint32_t node;          // one of them
  uint32_t num_siblings;  // of so many
  bool is_full;           // others may be in the next bucket
};

FT_DEVICE BucketView look_into(const ChildTable& table, uint32_t bucket, ChildRange range) {
  const uint32_t* places = table.places + static_cast<uint64_t>(bucket) * kBucketPlaces;
  const simt::Quad low = simt::load_quad(places), high = simt::load_quad(places + 4);
  const uint32_t entries[kBucketPlaces] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  BucketView view{0, 0, true};
#pragma unroll
  for (uint32_t i = 0; i < kBucketPlaces; ++i) {
    const bool is_sibling = entries[i] - range.first < range.fan_out();
    view.node = is_sibling ? entries[i] : view.node;
    view.num_siblings += is_sibling;
    view.is_full &= entries[i] != 0;
  }
  return view;
}

// The child of a node that is in the table with this label, or kNoNode.
FT_DEVICE uint32_t find_in_table(const ChildTable& table, const TrieView& trie, const uint32_t* tags, ChildRange range,
                                 uint32_t token) {
  auto has_label = [&](uint32_t node) {
    const uint32_t tag = simt::load_word(simt::at(tags, node));
    return (simt::load_word(simt::at(trie.label_low, node)) | tag >> kTagHighShift << 16) == token;
  };
  uint32_t bucket = child_bucket(table.num_buckets, range.first, token);
#pragma unroll 1
  for (;;) {
    const BucketView view = look_into(table, bucket, range);
    if (view.num_siblings > 0 && has_label(view.node)) return view.node;
    const uint32_t* places = table.places + static_cast<uint64_t>(bucket) * kBucketPlaces;
#pragma unroll 1
    for (uint32_t i = 0; view.num_siblings > 1 && i < kBucketPlaces; ++i) {
      const uint32_t other = simt::load_word(places + i);
      if (other - range.first < range.fan_out() && has_label(other)) return other;
    }
    if (!view.is_full) return kNoNode;
    bucket = bucket + 1 < table.num_buckets ? bucket + 1 : 0;
  }
}

// Puts the children of a wide node into `places`, which are `table`'s; by the `count` threads of which this is the one
// at `place`.
FT_DEVICE void put_children(const TrieView& trie, const ChildTable& table, uint32_t* places, ChildRange range, uint32_t place,
                            uint32_t count) {
#pragma unroll 1
  for (uint32_t child = range.first + place; child < range.last; child += count) {
    uint64_t at = static_cast<uint64_t>(child_bucket(table.num_buckets, range.first, label(trie, child))) * kBucketPlaces;
    const uint64_t end = static_cast<uint64_t>(table.num_buckets) * kBucketPlaces;
    while (simt::atomic_replace(&places[at], 0, child) != 0) at = at + 1 < end ? at + 1 : 0;
  }
}

}  // namespace flashtrie
