// SPDX-License-Identifier: Apache-2.0
// Decoding of weights that are stored in 8 or 4 bits, for one product in 16 bits.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "fusible/dtype.h"

namespace fusible {

// The meaning of a code. Two codes of four bits are a byte; the first one is in its low bits, but for kNF4.
enum class Codes : int { kE2M1 = 0, kNF4 = 1, kInteger = 2, kE4M3 = 3 };  // kInteger: code - 8

// How scales are stored.
enum class StoredScale : int {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kE4M3 = 3,    // times a factor in float32, or divided by it
  kE8M0 = 4,    // 2^(byte - 127)
  kNested = 5,  // map[byte] * scale of 256 scales + offset
};

// out = (code - zero point) * scale in float32, rounded once. A scale is of a block of `rows_of_scale` x
// `columns_of_scale` values; the last blocks may be smaller.
struct DecodeWeight {
  int64_t groups, n, k;
  Codes codes;
  const uint8_t* data;  // [groups, n, k] codes
  StoredScale stored_scale;
  const void* scales;                       // [groups, blocks of n, blocks of k]
  int64_t rows_of_scale, columns_of_scale;  // columns: a power of two from 8 on, or at least k
  // Numbers beside the scales; may be null, but for kNested.
  //   kE4M3       float32 [groups, sections]: the factors of equal sections of the rows
  //   kNested     float32 [groups, scales / 256 + 256 + 1]: scales of scales, the map, the offset
  //   kInteger    int32 [groups, n / 8, blocks of k]: zero points, eight rows to a word, the first one in its low bits
  const void* decoders;
  int64_t decoders_of_group;  // numbers of a group
  bool divides;
  DType type;  // bf16 or fp16
  void* out;   // [groups, n, k]
};

// Throws fusible::Error if the launch fails. k is a multiple of 8, and groups * n is below 2^31.
void decode_weight(const DecodeWeight& call, int device, cudaStream_t stream);

}  // namespace fusible
