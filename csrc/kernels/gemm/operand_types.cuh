// SPDX-License-Identifier: Apache-2.0
// The operands of a layout, as types.
#pragma once
#include "device/ptx/element.cuh"
#include "kernels/gemm/grouped_gemm.cuh"

namespace fusible {

template <Layout kLayout, class T, TileVariant kVariant>
struct Operands;
template <class T, TileVariant kVariant>
struct Operands<Layout::kNT, T, kVariant> {
  using A = TokenRows<T, kVariant.token_box()>;
  using B = WeightRows<T, kVariant.tile_n>;
};
template <class T, TileVariant kVariant>
struct Operands<Layout::kNN, T, kVariant> {
  using A = TokenRows<T, kVariant.token_box()>;
  using B = WeightColumns<T, kVariant.tile_n>;
};
template <class T, TileVariant kVariant>
struct Operands<Layout::kTN, T, kVariant> {
  using A = TokenColumns<T>;
  using B = TokenColumnsB<T, kVariant.tile_n>;
};

// Weights whose rows, or columns, come from both halves.
template <Layout kLayout, class T, int kTileN>
using GateUp = std::conditional_t<kLayout == Layout::kNT, GateUpRows<T, kTileN>, GateUpColumns<T, kTileN>>;

}  // namespace fusible
