// SPDX-License-Identifier: Apache-2.0
// Scales of whole rows of both e4m3 operands. They are constant along the depth, so a tile's are factors of the rows
// and columns of its sum, which the epilogue applies (epilogue.cuh).
#pragma once
#include "device/gemm/scaling.cuh"

namespace fusible {

// All of the depth is summed by the tensor cores, with 13 fraction bits, as operands of 16 bits are.
struct FastRowScaling : NoScaling {
  static constexpr bool kScalesColumns = true;
};

// Sums of stages are added in fp32, like those of blocks.
struct RowScaling : FastRowScaling {
  static constexpr bool kScaled = true;
  template <int kTileM, int kTileN, int kStages>
  struct Stages {
    static constexpr uint32_t kBytes = 0;
  };
  template <class P>
  DEVICE static void prefetch_maps(const P&) {}
  template <class... Arguments>
  DEVICE static void copy(const Arguments&...) {}

  template <class K>
  class Factors {
   public:
    explicit DEVICE Factors(const WorkTile&) {}
    DEVICE void read(const typename K::Storage&, int, int, int, int) {}
    DEVICE void begin_unit(int, const typename K::Storage&, int, int) {}
    template <bool kFirst>
    DEVICE void promote(float (&acc)[64], const float (&part)[64], const typename K::Storage&, int, int, int) const {
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] = (kFirst ? 0.f : acc[i]) + part[i];  // a copy would share its register
    }
  };
};

}  // namespace fusible
