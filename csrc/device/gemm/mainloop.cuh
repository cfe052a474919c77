// SPDX-License-Identifier: Apache-2.0
// The loop over the depth: one thread fetches stages of A and B, two warpgroups multiply them.
//
// The blocks of a cluster of two have either the same B or the same A (tile_scheduler.cuh): each fetches half of what
// they share and sends it to both. A stage is given back when the product that read it is done; meanwhile the other
// consumer keeps the tensor cores busy.
#pragma once
#include "device/epilogue/epilogue.cuh"
#include "device/gemm/operands.cuh"
#include "device/gemm/scaling.cuh"
#include "device/ptx/barrier.cuh"
#include "device/ptx/tma.cuh"

namespace fusible {

template <int kBytesOfA, int kBytesOfB, int kStages>
struct Stages {
  uint8_t a[kStages][kBytesOfA];
  uint8_t b[kStages][kBytesOfB];
};

struct Unicast {  // a copy for this block alone
  const CUtensorMap* map;
  uint64_t* full;
  template <class... Coordinates>
  DEVICE void operator()(void* to, Coordinates... c) const {
    tma::load(map, full, to, c...);
  }
};
struct Multicast {  // a copy for both blocks
  const CUtensorMap* map;
  uint64_t* full;
  template <class... Coordinates>
  DEVICE void operator()(void* to, Coordinates... c) const {
    tma::load_multicast(map, full, to, 3, c...);
  }
};

// At least one block: an empty group's weight gradient is the product of one block of zeros, unless columns are
// blocked.
template <class K>
DEVICE int k_blocks_of(const WorkTile& tile, const typename K::Params& p) {
  if constexpr (K::A::kRaggedDepth && K::Scaling::kScaled) return (tile.tokens + K::kTileK - 1) / K::kTileK;
  else if constexpr (K::A::kRaggedDepth) return max(1, (tile.tokens + K::kTileK - 1) / K::kTileK);
  else return p.k_blocks;
}

// Groups whose rows come while the kernel runs (token_groups.cuh).
template <class G>
concept RowsArrive = requires { requires G::kRowsArrive; };

template <class K>
DEVICE void produce(typename K::Storage& s, const typename K::Params& p, int rank) {
  using G = typename K::Groups;  // which says what fills a block of the depth
  typename K::Scheduler tiles(s.groups, s.work, p.shape, rank);
  PipelineState<K::kStages> state;
  if (p.neighbours.followed) ptx::let_next_kernel_begin();
  // Finding a tile takes a while: before the last stage is free, not when the tile is due.
  constexpr bool kAhead = K::kSpareRegisters;
  constexpr bool kMayBeEmpty = K::A::kRaggedDepth && K::Scaling::kScaled;
  WorkTile tile, following;
  for (bool more = tiles.next(tile); more; tile = following) {
    const int rows = (tile.rows + K::A::kRows - 1) / K::A::kRows;  // blocks of A
    const bool share_b = K::kCluster > 1 && !tile.share_a;
    const int pieces = tile.idle ? 0 : K::narrow(tile, p) ? K::kNarrowColumns / K::B::kChunkColumns : K::B::kPieces;
    uint32_t bytes = rows * (K::A::kRows * kSwizzleBytes) + pieces * (K::kTileN / K::B::kPieces * K::B::kRowBytes);
    if constexpr (K::Scaling::kScaled) bytes += decltype(s.scales)::kBytes;
    const int blocks = k_blocks_of<K>(tile, p);
    typename K::Scaling::template Putting<K> putting(p, tile);
    if constexpr (RowsArrive<G>) G::wait_for_rows(p, tile);
    for (int block = 0; block < blocks; ++block) {
      if (kAhead && block > 0 && block == blocks - 1) more = tiles.next(following);
      barrier_wait(&s.empty[state.stage], state.phase ^ 1);
      uint64_t* full = &s.full[state.stage];
      uint8_t *a = s.stages.a[state.stage], *b = s.stages.b[state.stage];
      putting.put(s, state.stage, block < blocks - 1);
      barrier_arrive_expecting(full, bytes);
      if constexpr (K::Scaling::kScaled) K::Scaling::copy(s, p, state.stage, block, tile);
      if (tile.share_a) {
#pragma unroll 1  // for the producers that have fewest registers
        for (int i = rank; i < rows; i += 2)
          K::A::copy(Multicast{G::a(p, block), full}, a, i, G::template depth<K>(p, block), G::tile(p, tile, block));
      } else if (rows == K::kTileM / K::A::kRows) {  // apart, because a loop of a known number of rounds is unrolled
#pragma unroll
        for (int i = 0; i < K::kTileM / K::A::kRows; ++i)
          K::A::copy(Unicast{G::a(p, block), full}, a, i, G::template depth<K>(p, block), G::tile(p, tile, block));
      } else {
#pragma unroll 1
        for (int i = 0; i < rows; ++i)
          K::A::copy(Unicast{G::a(p, block), full}, a, i, G::template depth<K>(p, block), G::tile(p, tile, block));
      }
      if (share_b) {
        const int shared = K::Scaling::kScaled ? pieces : K::B::kPieces;
        for (int i = rank; i < shared; i += 2)
          K::B::copy(Multicast{G::b(p, block), full}, b, i, G::template depth<K>(p, block), G::tile(p, tile, block));
      } else if (pieces == K::B::kPieces) {
#pragma unroll
        for (int i = 0; i < K::B::kPieces; ++i)
          K::B::copy(Unicast{G::b(p, block), full}, b, i, G::template depth<K>(p, block), G::tile(p, tile, block));
      } else {
#pragma unroll 1
        for (int i = 0; i < pieces; ++i)
          K::B::copy(Unicast{G::b(p, block), full}, b, i, G::template depth<K>(p, block), G::tile(p, tile, block));
      }
      if (block == 0) tiles.request();  // after the first copies, which are more urgent
      state.advance();
    }
    const bool empty = kMayBeEmpty && blocks == 0;
    if (empty) tiles.request();
    if (!kAhead || blocks == 1 || empty) more = tiles.next(following);
  }
  ptx::let_next_kernel_begin();
  for (int i = 0; i < K::kStages; ++i) {  // the other block's last arrivals land before this one ends
    barrier_wait(&s.empty[state.stage], state.phase ^ 1);
    state.advance();
  }
  if (p.neighbours.beside) ptx::wait_for_earlier_kernels();
}

template <class K>
DEVICE void release(typename K::Storage& s, int stage, int lane) {
  if (lane < K::kCluster) {
    if constexpr (K::kCluster == 1) barrier_arrive(&s.empty[stage]);
    else barrier_arrive_remote(&s.empty[stage], lane);  // both blocks write here
  }
}

// acc = A B over all of k, for the first kBlocks of the consumer's blocks of 64 rows: numbers consumer, consumer + 2,
// ... of the tile.
//
// With two blocks, the first is complete while the second is still being multiplied, and the second is left in its
// registers: the next tile's first product goes to the first block alone, and `meanwhile` stores the second one's. So
// the tensor cores always have a product to go on with. `ahead` is called once, while the last products are under way
// if there are registers for it. `done(i)` is called when block i is complete; for two blocks, of the first alone. The
// first kColumns of the tile's columns are multiplied.
template <class K, int kBlocks, int kColumns = K::kTileN, class Meanwhile, class Ahead, class Done>
DEVICE void multiply(float (&acc)[K::kRowBlocks][K::kTileN / 2], typename K::Storage& s,
                     PipelineState<K::kStages>& state, const WorkTile& tile, const typename K::Params& p, int consumer,
                     int lane, Meanwhile meanwhile, Ahead ahead, Done done) {
  using A = typename K::A;
  using B = typename K::B;
  const auto multiply_step = [&](int i, int step, bool accumulate) {
    wgmma<typename K::T, A::kTranspose, B::kTranspose>(
        reinterpret_cast<float (&)[kColumns / 2]>(acc[i]),
        A::descriptor(s.stages.a[state.stage] + (consumer + i * kConsumers) * kBlockBytes) + step * (A::kStep / 16),
        B::descriptor(s.stages.b[state.stage]) + step * (B::kStep / 16), accumulate);
  };
  const int before = k_blocks_of<K>(tile, p) - 1;
  int block = 0;
  if (kBlocks == 1 || before == 0) meanwhile();
  if constexpr (kBlocks == 2) {
    if (before > 0) {
      barrier_wait(&s.full[state.stage], state.phase);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < K::kStepsK; ++step) multiply_step(0, step, step != 0);
      wgmma_commit();
      meanwhile();
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < K::kStepsK; ++step) multiply_step(1, step, step != 0);
      wgmma_commit();
      wgmma_wait<0>();
      release<K>(s, state.stage, lane);
      state.advance();
      block = 1;
    }
  }
  for (; block < before; ++block) {
    barrier_wait(&s.full[state.stage], state.phase);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < K::kStepsK; ++step)
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) multiply_step(i, step, (block | step) != 0);
    wgmma_commit();
    wgmma_wait<0>();
    release<K>(s, state.stage, lane);
    state.advance();
  }
  barrier_wait(&s.full[state.stage], state.phase);
  const auto last = [&](auto steps) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int step = 0; step < steps.value; ++step) multiply_step(i, step, (before | step) != 0);
      wgmma_commit();
    }
  };
  // A ragged depth ends with the group's tokens; at least one step, so that an empty group gives zeros.
  if constexpr (A::kRaggedDepth) {
    static_assert(K::kStepsK == 4);
    const int rest = tile.tokens - before * K::kTileK;
    if (rest > 3 * A::kStepK) last(std::integral_constant<int, 4>());
    else if (rest > 2 * A::kStepK) last(std::integral_constant<int, 3>());
    else if (rest > A::kStepK) last(std::integral_constant<int, 2>());
    else last(std::integral_constant<int, 1>());
  } else if constexpr (K::Groups::kShortEnd) {
    if (K::Groups::short_end(p)) last(std::integral_constant<int, 1>());
    else last(std::integral_constant<int, K::kStepsK>());
  } else {
    last(std::integral_constant<int, K::kStepsK>());
  }
  if constexpr (K::kSpareRegisters && !K::kScaleBias) ahead();
  if constexpr (kBlocks == 2) wgmma_wait<1>();
  else wgmma_wait<0>();
  if constexpr (kBlocks == 2) {
    done(std::integral_constant<int, 0>());
    wgmma_wait<0>();
  }
  release<K>(s, state.stage, lane);
  state.advance();
  if constexpr (kBlocks == 1) done(std::integral_constant<int, 0>());
  if constexpr (!K::kSpareRegisters || K::kScaleBias) ahead();
}
// The same for a consumer whose rows do not exist (a loop of its own: a branch around wgmma makes ptxas serialise it).
template <class K>
DEVICE void skip(typename K::Storage& s, PipelineState<K::kStages>& state, int blocks, int lane) {
  for (int block = 0; block < blocks; ++block) {
    barrier_wait(&s.full[state.stage], state.phase);
    release<K>(s, state.stage, lane);
    state.advance();
  }
}

}  // namespace fusible
