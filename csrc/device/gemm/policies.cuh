// SPDX-License-Identifier: Apache-2.0
// The requirements on the three parts of the grouped GEMM's kernel (kernels/gemm/grouped_gemm.cuh).
#pragma once
#include <concepts>

#include "device/gemm/mainloop.cuh"

namespace fusible {

// How stages of an operand get into shared memory, and how wgmma finds them there (operands.cuh).
template <class X>
concept Operand = requires(Unicast issue, uint8_t* stage, int i, int k, const WorkTile& tile) {
  typename X::Element;
  requires X::kTileK % X::kStepK == 0;                          // values of k in a stage, and in one wgmma
  requires X::kTranspose == 0 || X::kTranspose == 1;            // MN-major
  requires X::kStep % 16 == 0;                                  // bytes from one wgmma's values of k to the next one's
  { X::descriptor(stage) } -> std::same_as<uint64_t>;           // of a block of 64 rows or columns
  { X::copy(issue, stage, i, k, tile) } -> std::same_as<void>;  // block or piece number i of a tile, from k on
};
// Blocks of kRows rows or columns. kRaggedDepth: the depth is the group's own, not the same for all groups.
template <class X>
concept OperandA = Operand<X> && requires {
  requires X::kRows > 0;
  { X::kRaggedDepth } -> std::convertible_to<bool>;
};
// kPieces equal pieces.
template <class X>
concept OperandB = Operand<X> && requires { requires X::kPieces > 0; };

// How a consumer's output stage is stored: by one thread that copies it to its destination (kStoreWarps is 0,
// epilogue_store.cuh), or by kStoreWarps whole warps, which need kRegisters each (epilogue_activation.cuh). Three per
// consumer are two beside the producer, and a warpgroup.
template <class X>
concept EpiloguePolicy = std::derived_from<typename X::Params, GemmParams> && requires {
  typename X::Scratch;  // of shared memory
  requires X::kStoreWarps >= 0 && X::kRegisters % 8 == 0;
};
// An epilogue for a kernel K: stores all tiles of a consumer, by store warp number `store_warp`.
template <class X, class K>
concept EpilogueOf = requires(typename K::Storage& s, const typename K::Params& p, int consumer, int store_warp) {
  { X::template store_tiles<K>(s, p, consumer, store_warp) } -> std::same_as<void>;
};

// The source of tiles, and the roles that fill the stages and fetch bias and factors: token_groups.cuh,
// ragged_producer.cuh.
template <class X>
concept GroupsPolicy = requires {
  typename X::Table;                              // group data that all roles read, in shared memory
  requires X::kProducers > 0;                     // arrivals at a stage
  { X::kShortEnd } -> std::convertible_to<bool>;  // whether the last block of the depth may be one step of a product
  typename X::template Params<GemmParams>;        // parameters of a kernel, from those of its epilogue
  typename X::template Scheduler<kTileVariants[0], true>;
};
template <class X, class K>
concept GroupsOf = requires(typename K::Storage& s, const typename K::Params& p, int i) {
  { X::template fill<K>(s, p, i) } -> std::same_as<void>;     // the table, by a lane of one warp
  { X::template produce<K>(s, p, i) } -> std::same_as<void>;  // all stages, by warp 0 of block i of a cluster
  { X::template fetch<K>(s, p) } -> std::same_as<void>;       // bias and factors of all tiles, by warp 1
};

}  // namespace fusible
