// SPDX-License-Identifier: Apache-2.0
#include "fusible/tensor_map.h"

#include <array>

#include "fusible/driver_entry.h"
#include "fusible/error.h"

namespace fusible {
namespace {

CUtensorMapDataType map_type(DType type) {
  switch (type) {
    case DType::kFloat32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kE4M3: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case DType::kFloat16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

// Sizes and box in elements, innermost first; strides in bytes, of dimensions 1 and up.
template <size_t kRank>
CUtensorMap encode(uintptr_t base, DType type, const std::array<uint64_t, kRank>& sizes,
                   const std::array<uint64_t, kRank - 1>& strides, const std::array<uint32_t, kRank>& box,
                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  return encode_map(base, {map_type(type), swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE, sizes, strides, box});
}

struct Bytes {
  uintptr_t base;
  uint64_t pitch, group;
  explicit Bytes(const MatrixView& m)
      : base(reinterpret_cast<uintptr_t>(m.data)),
        pitch(m.pitch * bytes_of(m.type)),
        group(m.group_stride * bytes_of(m.type)) {}
};

uint32_t subtile_columns(DType type) { return static_cast<uint32_t>(128 / bytes_of(type)); }
uint32_t depth(DType type) { return static_cast<uint32_t>(tile_k(type)); }

using Extent = uint64_t;
constexpr Extent kNear = 1ull << kNearBits, kFar = 1ull << 16;  // far enough for 50 bits of address

// The last two dimensions of the matrices of the groups: sizes and strides.
struct GroupDimensions {
  Extent near, far;
  uint64_t near_bytes, far_bytes;
  GroupDimensions(const MatrixView& m, int64_t groups)
      : near(groups), far(1), near_bytes(Bytes(m).group), far_bytes(kNearBytes) {
    if (!m.addresses.empty()) near = kNear, far = kFar, near_bytes = kNearBytes, far_bytes = kNear * kNearBytes;
  }
};

// The matrices of the groups, `rows` x `columns` each.
CUtensorMap matrices_map(const MatrixView& m, int64_t groups, int64_t rows, int64_t columns,
                         const std::array<uint32_t, 4>& box, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  const Bytes bytes(m);
  const GroupDimensions g(m, groups);
  return encode<4>(bytes.base, m.type, {Extent(columns), Extent(rows), g.near, g.far},
                   {bytes.pitch, g.near_bytes, g.far_bytes}, box, swizzle);
}

}  // namespace

CUtensorMap encode_map(uintptr_t base, const MapForm& form) {
  static const auto encoder = driver_entry<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  constexpr uint32_t kOnes[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder(&map, form.type, static_cast<uint32_t>(form.sizes.size()), reinterpret_cast<void*>(base),
              form.sizes.data(), form.strides.data(), form.box.data(), kOnes, CU_TENSOR_MAP_INTERLEAVE_NONE,
              form.swizzle, form.promotion, form.fill);
  FUSIBLE_CHECK(result == CUDA_SUCCESS, "tensor map refused with driver error ", static_cast<int>(result), ": base ",
                base, ", sizes ", form.sizes[0], " x ", form.sizes[1], ", row pitch ", form.strides[0], " bytes");
  return map;
}

CUtensorMap token_rows_map(const MatrixView& a, int64_t tokens, int64_t k, int box) {
  const Bytes bytes(a);
  return encode<2>(bytes.base, a.type, {Extent(k), Extent(tokens)}, {bytes.pitch}, {depth(a.type), uint32_t(box)});
}

CUtensorMap ragged_depth_map(const MatrixView& a, int64_t tokens, int64_t columns) {
  // The middle dimension's stride is 2^34 - pitch; its coordinate 2^30 brings 2^64 - 2^30 pitch, which cancels the
  // first's 2^30.
  constexpr Extent kBig = 1ull << 30;
  const Bytes bytes(a);
  return encode<4>(bytes.base, a.type, {Extent(columns), kBig, kBig + 1, Extent(tokens) + 1},
                   {bytes.pitch, (1ull << 34) - bytes.pitch, bytes.pitch},
                   {subtile_columns(a.type), depth(a.type), 1, 1});
}

CUtensorMap weight_rows_map(const MatrixView& b, int64_t groups, int64_t n, int64_t k, int tile_n) {
  return matrices_map(b, groups, n, k, {depth(b.type), uint32_t(tile_n / 2), 1, 1});
}

CUtensorMap gate_up_rows_map(const MatrixView& b, int64_t groups, int64_t half, int64_t k, int tile_n) {
  const Bytes bytes(b);
  const GroupDimensions g(b, groups);
  return encode<5>(bytes.base, b.type, {Extent(k), Extent(half), 2, g.near, g.far},
                   {bytes.pitch, bytes.pitch * Extent(half), g.near_bytes, g.far_bytes},
                   {depth(b.type), uint32_t(tile_n / 2), 1, 1, 1});
}

CUtensorMap gate_up_columns_map(const MatrixView& b, int64_t groups, int64_t half, int64_t k) {
  const Bytes bytes(b);
  const GroupDimensions g(b, groups);
  return encode<5>(bytes.base, b.type, {Extent(half), 2, Extent(k), g.near, g.far},
                   {Extent(half) * bytes_of(b.type), bytes.pitch, g.near_bytes, g.far_bytes},
                   {subtile_columns(b.type), 1, depth(b.type), 1, 1});
}

CUtensorMap weight_columns_map(const MatrixView& b, int64_t groups, int64_t k, int64_t n, int tile_n) {
  return matrices_map(b, groups, k, n, {subtile_columns(b.type), depth(b.type) / (tile_n / 64 % 2 ? 2 : 1), 1, 1});
}

CUtensorMap packed_weight_map(const MatrixView& b, int64_t groups, int64_t n, int64_t k, bool transposed) {
  if (transposed) return matrices_map(b, groups, n, k / 2, {64, 32, 1, 1}, CU_TENSOR_MAP_SWIZZLE_64B);
  return matrices_map(b, groups, n, k / 2, {32, 64, 1, 1}, CU_TENSOR_MAP_SWIZZLE_32B);
}

CUtensorMap blocked_tokens_map(const MatrixView& a, int64_t blocks, int64_t columns, int box) {
  const Bytes bytes(a);
  const uint32_t row = depth(a.type);
  return encode<3>(bytes.base, a.type, {row, Extent(columns), Extent(blocks)}, {row, Extent(columns) * row},
                   {row, uint32_t(box), 1});
}

CUtensorMap scales_map(const float* scales, int64_t rows, int64_t blocks, int64_t pitch, int box) {
  return encode<2>(reinterpret_cast<uintptr_t>(scales), DType::kFloat32, {Extent(rows), Extent(blocks)},
                   {Extent(pitch) * sizeof(float)}, {uint32_t(box), 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
}

CUtensorMap token_output_map(const MatrixView& out, int64_t tokens, int64_t n, int box) {
  // The base is moved back by T rows, so that both coordinates of a row add up to its own address.
  const Bytes bytes(out);
  return encode<4>(bytes.base - Extent(tokens) * bytes.pitch, out.type,
                   {Extent(n), Extent(tokens), Extent(tokens) + 1, 1}, {bytes.pitch, bytes.pitch, kNearBytes},
                   {subtile_columns(out.type), uint32_t(box), 1, 1});
}

CUtensorMap gate_up_output_map(const MatrixView& out, int64_t tokens, int64_t half) {
  const Bytes bytes(out);
  return encode<4>(
      bytes.base - Extent(tokens) * bytes.pitch, out.type, {Extent(half), 2, Extent(tokens), Extent(tokens) + 1},
      {Extent(half) * bytes_of(out.type), bytes.pitch, bytes.pitch}, {subtile_columns(out.type), 1, 64, 1});
}

CUtensorMap weight_output_map(const MatrixView& out, int64_t groups, int64_t m, int64_t n) {
  return matrices_map(out, groups, m, n, {subtile_columns(out.type), 64, 1, 1});
}

CUtensorMap model_map(const void* any, DType type, int dimensions, int box_rows) {
  const uintptr_t base = reinterpret_cast<uintptr_t>(any);
  const uint32_t columns = subtile_columns(type), rows = static_cast<uint32_t>(box_rows);
  if (dimensions == 2) return encode<2>(base, type, {columns, rows}, {128}, {columns, rows});
  return encode<4>(base, type, {columns, rows, 1, 1}, {128, kNearBytes, kNearBytes}, {columns, rows, 1, 1});
}

}  // namespace fusible
