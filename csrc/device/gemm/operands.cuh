// SPDX-License-Identifier: Apache-2.0
// How a stage of A (tile_m x 64) or B (tile_n x 64) gets into shared memory, and how wgmma finds it there.
//
// K-major: rows of 64 values of k, 128 bytes each, 8 rows a swizzle atom. The stride offset is from one atom of 8 rows
// to the next (1024), the leading offset is ignored, and the next 16 values of k are 32 bytes on. MN-major: 64 columns
// (m or n) x 64 values of k, one row of 128 bytes for each k. The stride offset is from 8 values of k to the next
// (1024), the leading offset from 64 columns to the next 64 (8192), and the next 16 values of k are 2048 bytes on.
//
// A is copied in blocks of kRows rows or columns, 64 of which take 8 KB of shared memory; B in kPieces equal pieces.
// `copy` moves block or piece number `i` of a tile; `issue` says whether the bytes are for this block alone or for both
// of the cluster. The boxes of the tensor maps (fusible/tensor_map.h) must agree.
#pragma once
#include "device/gemm/tile_scheduler.cuh"
#include "device/ptx/wgmma.cuh"

namespace fusible {

constexpr int kSwizzleBytes = 128;               // of a row in shared memory
constexpr int kBlockBytes = 64 * kSwizzleBytes;  // 64 such rows

// Types and constants that follow from the type of an operand's elements.
template <class T>
struct OperandOf {
  using Element = T;
  static constexpr int kTileK = tile_k(sizeof(T));                 // values of k in a stage
  static constexpr int kStepK = 32 / sizeof(T);                    // of them in one wgmma
  static constexpr int kChunkColumns = kSwizzleBytes / sizeof(T);  // MN-major: columns side by side in shared memory
  static constexpr bool kPacked = false;                           // decoded in registers (packed_operands.cuh)
  static constexpr int kRowBytes = kSwizzleBytes;                  // of a stage, for each row or column of the tile
};
// kStep: bytes from one wgmma's values of k to the next one's.
template <class T>
struct KMajor : OperandOf<T> {
  static constexpr int kTranspose = 0, kStep = OperandOf<T>::kStepK * sizeof(T);
  DEVICE static uint64_t descriptor(const uint8_t* p) { return matrix_descriptor(p, 16, 8 * kSwizzleBytes); }
};
template <class T>
struct MnMajor : OperandOf<T> {
  static constexpr int kTranspose = 1, kStep = OperandOf<T>::kStepK * kSwizzleBytes;
  DEVICE static uint64_t descriptor(const uint8_t* p) { return matrix_descriptor(p, kBlockBytes, 8 * kSwizzleBytes); }
};

// A [T, K]: the group's tokens are rows.
template <class T, int kRowsValue = 64>
struct TokenRows : KMajor<T> {
  static constexpr bool kRaggedDepth = false;
  static constexpr int kRows = kRowsValue;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kRows * kSwizzleBytes, k, tile.tokens_start + tile.row + i * kRows);
  }
};
// A [T, columns]: the group's tokens are the depth. Tokens past the group's end load as zero (ragged_depth_map).
template <class T>
struct TokenColumns : MnMajor<T> {
  static constexpr bool kRaggedDepth = true;
  static constexpr int kRows = MnMajor<T>::kChunkColumns;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kBlockBytes, tile.row + i * kRows, (1 << 30) - tile.tokens + k, 1 << 30,
          tile.tokens_start + tile.tokens);
  }
};
// B [T, columns], likewise.
template <class T, int kTileN>
struct TokenColumnsB : MnMajor<T> {
  static constexpr int kColumns = MnMajor<T>::kChunkColumns, kPieces = kTileN / kColumns;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kBlockBytes, tile.column * kTileN + i * kColumns, (1 << 30) - tile.tokens + k, 1 << 30,
          tile.tokens_start + tile.tokens);
  }
};
// A [blocks, columns, 128]: tokens in blocks of a stage's depth, transposed. A group starts at a block (BlockedGroups).
template <class T>
struct BlockedTokens : KMajor<T> {
  static constexpr bool kRaggedDepth = true;
  static constexpr int kRows = 64;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kBlockBytes, 0, tile.row + i * kRows, tile.tokens_start + k / KMajor<T>::kTileK);
  }
};
// B [blocks, columns, 128], likewise, in halves.
template <class T, int kTileN>
struct BlockedTokensB : KMajor<T> {
  static constexpr int kPieces = 2, kRows = kTileN / 2;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kRows * kSwizzleBytes, 0, tile.column * kTileN + i * kRows,
          tile.tokens_start + k / KMajor<T>::kTileK);
  }
};
// B [N, K] of each group, in halves.
template <class T, int kTileN>
struct WeightRows : KMajor<T> {
  static constexpr bool kHalves = false;
  static constexpr int kPieces = 2, kRows = kTileN / 2;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kRows * kSwizzleBytes, k, tile.column * kTileN + i * kRows, tile.coordinate.near,
          tile.coordinate.far);
  }
};
// B [2, F, K] of each group: as many rows of either half, gate and up.
template <class T, int kTileN>
struct GateUpRows : KMajor<T> {
  static constexpr bool kHalves = true;
  static constexpr int kPieces = 2, kRows = kTileN / 2;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kRows * kSwizzleBytes, k, tile.column * kRows, i, tile.coordinate.near, tile.coordinate.far);
  }
};
// B [K, 2, F] of each group: as many columns of either half, in chunks of 64.
template <class T, int kTileN>
struct GateUpColumns : MnMajor<T> {
  static constexpr bool kHalves = true;
  static constexpr int kColumns = MnMajor<T>::kChunkColumns, kPieces = kTileN / kColumns, kOfHalf = kPieces / 2;
  static_assert(kPieces % 2 == 0, "a half of a tile is made of whole chunks");
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * kBlockBytes, tile.column * (kTileN / 2) + i % kOfHalf * kColumns, i / kOfHalf, k,
          tile.coordinate.near, tile.coordinate.far);
  }
};
// B [K, N] of each group, in chunks of 64 columns. An odd number does not divide between two blocks: half chunks then.
template <class T, int kTileN>
struct WeightColumns : MnMajor<T> {
  static constexpr bool kHalves = false;
  static constexpr int kColumns = MnMajor<T>::kChunkColumns, kParts = kTileN / kColumns % 2 ? 2 : 1;
  static constexpr int kPieces = kTileN / kColumns * kParts, kDepth = MnMajor<T>::kTileK / kParts;
  template <class Issue>
  DEVICE static void copy(Issue issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
    issue(stage + i * (kBlockBytes / kParts), tile.column * kTileN + i / kParts * kColumns, k + i % kParts * kDepth,
          tile.coordinate.near, tile.coordinate.far);
  }
};

}  // namespace fusible
