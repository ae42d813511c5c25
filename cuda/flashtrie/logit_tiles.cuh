// A batch of logits cut into tiles, one warp a tile: minus infinity over everything but what a tile's marks keep.
//
// A warp needs nothing of the others: a tile in which nothing is allowed is 16-byte stores and no more, and warps
// that wait for what their row allows leave the memory to those that write. Tiles of a row are numbered along it, and
// a tile's first vector may begin before the row does, because vectors start on 16 bytes.
#pragma once
#include "simt.cuh"

namespace flashtrie {

constexpr int kLineBytes = 128;  // of memory: what a tile begins with, so that no two warps write into one

// Raw logits of a size, and what minus infinity is in them.
struct Float32 {
  using Raw = uint32_t;
  static constexpr uint32_t kMinusInfinity = 0xff800000u;
};
struct Float16 {
  using Raw = uint16_t;
  static constexpr uint32_t kMinusInfinity = 0xfc00fc00u;  // two of them
};
struct BFloat16 {
  using Raw = uint16_t;
  static constexpr uint32_t kMinusInfinity = 0xff80ff80u;
};

struct LogitBatch {
  void* logits;
  const uint32_t* rows;  // num_rows: which row of the logits each is; null where they are the rows in order
  int64_t row_stride;  // logits from one row to the next
  uint32_t width;      // logits a row, below 2^30
  uint32_t num_rows;
  uint32_t num_tiles;  // of a row
  uint32_t inverse;    // of num_tiles: ceil(2^(31 + shift) / num_tiles), with 2^shift the next power of two
  uint32_t shift;

  // The logits' row that is the batch's row `which`, as it is now.
  FT_DEVICE uint32_t place_of(uint32_t which) const { return rows == nullptr ? which : simt::load_changing(rows + which); }

  FT_DEVICE uint32_t row_of(uint32_t tile) const {  // tile / num_tiles, exact below 2^31
    return static_cast<uint32_t>((static_cast<uint64_t>(tile) * inverse >> 31) >> shift);
  }
};

// `kVectors` of a lane; of a tile that keeps much, it reads `kTogether` before it writes them.
template <typename Type, int kVectorsOfLane, int kReadTogether = kVectorsOfLane>
struct LogitTile {
  static constexpr int kVectors = kVectorsOfLane, kTogether = kReadTogether < kVectors ? kReadTogether : kVectors;
  using Raw = typename Type::Raw;
  static constexpr int kPer = 16 / sizeof(Raw);          // logits a vector
  static constexpr int kLogits = 32 * kVectors * kPer;
  static constexpr int kWords = kLogits / 32;             // of a tile's marks: bit token - begin
  static constexpr uint32_t kAll = (1u << kPer) - 1;

  Raw* row;
  int32_t begin;       // logit of the row with which the tile begins; before the first in some rows
  uint32_t low, high;  // logits [low, high) of the row are the tile's
  bool is_whole;       // no vector reaches over an end of the row

  FT_DEVICE LogitTile(const LogitBatch& batch, uint32_t row_number, uint32_t number) {
    row = static_cast<Raw*>(batch.logits) + row_number * batch.row_stride;
    const int32_t shift = static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) % kLineBytes / sizeof(Raw));
    begin = static_cast<int32_t>(number) * kLogits - shift;
    const int32_t end = begin + kLogits, width = static_cast<int32_t>(batch.width);
    low = begin > 0 ? begin : 0;
    high = end < width ? end : width;
    is_whole = begin >= 0 && end <= width;
  }

  FT_DEVICE bool holds(uint32_t token) const { return token >= low && token < high; }

  FT_DEVICE static simt::Quad nothing() {
    constexpr uint32_t kWord = Type::kMinusInfinity;
    return {kWord, kWord, kWord, kWord};
  }

  // Where the lane's j-th vector begins, in logits from the tile's begin.
  FT_DEVICE static int32_t offset(int j) { return (32 * j + static_cast<int32_t>(simt::lane())) * kPer; }

  FT_DEVICE simt::Quad* vector(int j) const { return reinterpret_cast<simt::Quad*>(row + begin + offset(j)); }

  // Which logits of the lane's j-th vector are allowed.
  FT_DEVICE static uint32_t allowed(const uint32_t* marks, int j) {
    const int32_t bit = offset(j);
    return (marks[bit / 32] >> (bit % 32)) & kAll;
  }

  // Which of them lie beyond an end of the row.
  FT_DEVICE uint32_t outside(int j) const {
    const int32_t first = begin + offset(j), past = static_cast<int32_t>(high) - first;
    const uint32_t before = first >= 0 ? 0 : first <= -kPer ? kAll : (1u << -first) - 1;
    return before | (past >= kPer ? 0 : past <= 0 ? kAll : kAll & ~((1u << past) - 1));
  }

  FT_DEVICE static simt::Quad merged(const simt::Quad& old, uint32_t kept) {
    constexpr uint32_t kWord = Type::kMinusInfinity;
    const uint32_t in[4] = {old.x, old.y, old.z, old.w};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (sizeof(Raw) == 4) {
        out[i] = (kept >> i) & 1 ? in[i] : kWord;
      } else {
        const uint32_t keep = ((kept >> (2 * i)) & 1 ? 0xffffu : 0) | ((kept >> (2 * i)) & 2 ? 0xffff0000u : 0);
        out[i] = (in[i] & keep) | (kWord & ~keep);
      }
    }
    return {out[0], out[1], out[2], out[3]};
  }

  // Vectors of a lane from its j-th on, those read that hold something allowed.
  struct Kept {
    simt::Quad vectors[kTogether];
  };

  FT_DEVICE Kept read(const uint32_t* marks, int from) const {
    Kept kept;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      kept.vectors[j] = nothing();
      simt::load_quad_if(allowed(marks, from + j) != 0, vector(from + j), &kept.vectors[j]);
    }
    return kept;
  }

  // Minus infinity over all but what is allowed, in a whole tile.
  FT_DEVICE void write(const Kept& kept, const uint32_t* marks, int from) const {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) simt::store_quad(vector(from + j), merged(kept.vectors[j], allowed(marks, from + j)));
  }

  // The same where nothing in the tile is allowed.
  FT_DEVICE void clear() const {
    if (!is_whole) return clear_around(nullptr);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) simt::store_quad(vector(j), nothing());
  }

  // The same in any tile: what is kept is not read, but left out. `marks`: null where nothing is allowed.
  FT_DEVICE void clear_around(const uint32_t* marks) const {
#pragma unroll 1
    for (int j = 0; j < kVectors; ++j) {
      const uint32_t keeps = (marks == nullptr ? 0 : allowed(marks, j)) | (is_whole ? 0 : outside(j));
      if (keeps == 0)
        simt::store_quad(vector(j), nothing());
      else
        clear_around(vector(j), keeps);
    }
  }

  // Minus infinity over all of a vector but `keeps`, in as large pieces as there are.
  FT_DEVICE static void clear_around(simt::Quad* at, uint32_t keeps) {
    constexpr uint32_t kWord = Type::kMinusInfinity, kHalf = (1u << (kPer / 2)) - 1, kQuarter = (1u << (kPer / 4)) - 1;
    uint32_t* const words = reinterpret_cast<uint32_t*>(at);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t kept = keeps >> (half * kPer / 2) & kHalf;
      if (kept == 0) {
        simt::store_pair(words + 2 * half, {kWord, kWord});
      } else {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          const uint32_t of_word = keeps >> (i * kPer / 4) & kQuarter;
          if (of_word == 0) words[i] = kWord;
          if (sizeof(Raw) == 2 && of_word == 1) reinterpret_cast<Raw*>(words + i)[1] = static_cast<Raw>(kWord);
          if (sizeof(Raw) == 2 && of_word == 2) reinterpret_cast<Raw*>(words + i)[0] = static_cast<Raw>(kWord);
        }
      }
    }
  }

  // Asks for what `read` will read.
  FT_DEVICE void prefetch(const uint32_t* marks) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (allowed(marks, j) != 0) simt::prefetch(vector(j));
  }
};

}  // namespace flashtrie
