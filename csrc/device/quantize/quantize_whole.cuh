// SPDX-License-Identifier: Apache-2.0
// Scales of whole rows and of groups, which many tiles have in common: the largest magnitudes of all tiles first, then
// the bytes, from the same values read again.
#pragma once
#include "device/quantize/quantize.cuh"
#include "fusible/quantize.h"

namespace fusible {

// Magnitudes as the bits of floats, which integers order, with NaN above infinity: the order of tiles does not matter.
struct Maxima {
  uint32_t *rows, *columns, *groups;

  // `row_count`: of all groups.
  Maxima(Scaling scaling, float* amax, int64_t row_count)
      : rows(reinterpret_cast<uint32_t*>(amax)), columns(rows + row_count), groups(rows) {
    if (scaling == Scaling::kGroups) rows = columns = nullptr;
    else groups = nullptr;
  }
};

DEVICE void raise(uint32_t* to, float amax) { atomicMax(to, __float_as_uint(amax)); }

// How the values of a kernel's operand are scaled; of a group, or of one row or column of it.
struct WholeScales {
  bool power_of_two;
  const float* encode;  // of groups, known before; null: it follows from the amax

  template <class T>
  DEVICE Encoding of(uint32_t bits, int64_t group) const {
    const float amax = __uint_as_float(bits);
    Encoding encoding = encoding_of<T>(amax, power_of_two);
    if (encode) {
      encoding.encode = encode[group];
      if (amax < INFINITY) encoding.decode = __fdiv_rn(1.f, encoding.encode);
    }
    return encoding;
  }
};

// Converts again, as registers do not suffice to keep the values converted for rows.
template <class T>
DEVICE void convert_again(Tile<T>& tile) {
#pragma unroll
  for (int i = 0; i < kTileRows; ++i)
#pragma unroll
    for (int j = 0; j < Tile<T>::kWords; ++j) asm volatile("" : "+r"(tile.words[i][j]));
}

// Stores the bytes of a tile's rows, each with the factor of its values.
template <class T>
DEVICE void store_scaled_rows(const Tile<T>& tile, const TilePosition& at, const TileExtent& extent,
                              const float (&encode)[kScaleBlock], uint8_t* data, int64_t pitch) {
  uint8_t* to = data + at.row() * pitch + at.feature();
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    const uint2 bytes = row_bytes(tile, i, encode[at.row() + i]);
    ptx::store_vector_if(extent.has(at, i), to + i * pitch, bytes);
  }
}

}  // namespace fusible
