// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM: bf16 or fp16 operands, fp32 accumulation, output in the operands' type or fp32.
//
// A persistent kernel of three warpgroups a block. In the first, one thread issues the copies of A and B
// (mainloop.cuh), one warp fetches bias and scales, and two threads store the tile before (epilogue.cuh); the other two
// warpgroups multiply, each every second block of 64 rows of the tile, or half of its columns (swap_ab.cuh).
#pragma once
#include "device/epilogue/epilogue_store.cuh"
#include "device/gemm/policies.cuh"
#include "device/gemm/scaled_mainloop.cuh"
#include "device/gemm/split_k.cuh"
#include "device/gemm/swap_ab.cuh"
#include "device/gemm/token_groups.cuh"

namespace fusible {

template <OperandA A_, OperandB B_, class Out_, bool kScaleBiasValue, TileVariant kVariant,
          EpiloguePolicy Epilogue = StoreEpilogue, GroupsPolicy Groups_ = TokenGroups, class Scaling_ = NoScaling>
struct GroupedGemmKernel {
  using A = A_;
  using B = B_;
  using Groups = Groups_;
  using T = typename A::Element;
  static_assert(std::is_same_v<T, typename B::Element>, "both operands have elements of one type");
  static constexpr int kTileK = A::kTileK, kStepsK = kTileK / A::kStepK;
  using Scaling = Scaling_;
  using Params = typename Scaling::template Params<typename Groups::template Params<typename Epilogue::Params>>;
  static constexpr int kTileM = kVariant.tile_m, kTileN = kVariant.tile_n, kStages = kVariant.stages,
                       kCluster = kVariant.cluster();
  static constexpr int kRowBlocks = kTileM / (64 * kConsumers);  // of a consumer
  static constexpr bool kUnitsAreRows = kRowBlocks == 2;         // of scaled operands (scaled_mainloop.cuh)
  static constexpr bool kScaleBias = kScaleBiasValue, kRaggedDepth = A::kRaggedDepth;
  static constexpr bool kWholeWarp = Epilogue::kStoreWarps > 0, kApart = Epilogue::kStoreWarps > 1;
  static_assert(!kApart || kConsumers * Epilogue::kStoreWarps == 6, "two beside the producer, and a warpgroup");
  static constexpr int kThreads = 128 * (1 + kConsumers + kApart);
  static constexpr bool kSpareRegisters = !kVariant.large() && !kApart && !B::kPacked;  // beside the accumulators
  using Scheduler = typename Groups::template Scheduler<kVariant, !kRaggedDepth>;
  using Out = Out_;
  static constexpr bool kSplits = kVariant.split_k;
  static constexpr int kSmemOutColumns = kVariant.smem_out_columns();
  using Layout = SmemOutLayout<Out, kSmemOutColumns, kVariant.smem_out_bytes(), kVariant.smem_out_rows(), kWholeWarp>;
  // Adding in the L2 cache runs at 1.25 TB/s. Therefore, for a weight gradient that is accumulated, as many old values
  // as fit are fetched while the tile is multiplied, and the sum is stored. The rest is added in the cache, or fetched
  // into buffers that have been stored, which the consumer waits for: where memory traffic decides, and for all 16-bit
  // outputs, whose sum is so rounded once.
  static constexpr bool kFetchesOld = (std::is_same_v<Out, float> || !Scaling::kScaled) && kRaggedDepth && !kWholeWarp;

  struct NoEpilogueStage {};
  struct EpilogueArguments {
    EpilogueStage<kTileM, kTileN, Scaling::kScalesColumns> stage;
    uint64_t full, empty;
  };
  struct __align__(1024) Storage {
    Stages<kTileM * A::kRowBytes, kTileN * B::kRowBytes, kStages> stages;
    uint8_t smem_out[kConsumers][Layout::kBytes];
    [[no_unique_address]] typename Scaling::template Stages<kTileM, kTileN, kStages> scales;
    uint64_t full[kStages], empty[kStages];
    uint64_t out_full[kConsumers][Layout::kSlots], out_empty[kConsumers][Layout::kSlots];
    [[no_unique_address]] std::conditional_t<kScaleBias, EpilogueArguments, NoEpilogueStage> epilogue;
    [[no_unique_address]] typename Epilogue::Scratch scratch;
    WorkQueue work;
    std::conditional_t<kSplits, SlicedGroupTable,
                       std::conditional_t<kVariant.highest_first, SortedGroupTable, typename Groups::Table>>
        groups;
  };
  static_assert(sizeof(Storage) <= kSharedMemoryLimit, "shared memory of a block");

  DEVICE static void init(Storage& s) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], Groups::kProducers);
      barrier_init(&s.empty[i], kCluster * kConsumers * 4);  // every consumer warp of the cluster
    }
    for (int i = 0; i < kConsumers * Layout::kSlots; ++i) {
      barrier_init(&s.out_full[0][i], kWholeWarp ? 128 : 4);  // the threads or warps of a consumer
      barrier_init(&s.out_empty[0][i], kWholeWarp ? 32 * Epilogue::kStoreWarps : 1);
    }
    if constexpr (kScaleBias) {
      barrier_init(&s.epilogue.full, 32);
      barrier_init(&s.epilogue.empty, kConsumers * 128);
    }
    constexpr int kReaders =
        kConsumers * (128 + (kWholeWarp ? 32 * Epilogue::kStoreWarps : 1)) + (kScaleBias || B::kPacked ? 32 : 0);
    s.work.init(kReaders);  // threads of the consumers, of the store warps, of the warp that fetches
    barrier_init_fence();
  }

  // Whether at most kNarrowColumns of a tile's columns exist. A narrower product then computes them, if the tile is
  // only limited by columns: 64 columns of 192 are a third of its work.
  static constexpr bool kNarrows =
      Scaling::kScaled ? kTileN == 256 && !kVariant.swap_ab : kTileN == 192 && kRaggedDepth && !kScaleBias;
  static constexpr int kNarrowColumns = 128;
  DEVICE static bool narrow(const WorkTile& tile, const Params& p) {
    return kNarrows && p.shape.narrow_end && tile.column == p.shape.columns - 1;
  }

  // A consumer's output stages of 64 rows, or fewer: of how many, rows exist; their first row in the tile; their
  // columns, in units of an output stage's. Consumers take turns with the rows of a tile, or share the columns of a
  // swap_ab one.
  DEVICE static int row_blocks(const WorkTile& tile, int consumer) {
    if constexpr (kVariant.swap_ab) return tile.idle ? 0 : (tile.rows + Layout::kRows - 1) / Layout::kRows;
    else return tile.idle ? 0 : max(0, (tile.rows - consumer * 64 + 64 * kConsumers - 1) / (64 * kConsumers));
  }
  // The number of existing blocks that are stored.
  DEVICE static int stored_blocks(const WorkTile& tile, int consumer) {
    if constexpr (kSplits)
      if (tile.slice.partial()) return 0;
    return row_blocks(tile, consumer);
  }
  DEVICE static int first_row(int consumer, int block) {
    return (kVariant.swap_ab ? block : consumer + block * kConsumers) * Layout::kRows;
  }
  DEVICE static int smem_out_column(const WorkTile& tile, int consumer) {
    return kVariant.swap_ab ? tile.column * kConsumers + consumer : tile.column;
  }

  DEVICE static void consume(Storage& s, const Params& p, int consumer) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    WorkTileReader tiles(s.work);
    PipelineState<kStages> state;
    PipelineState<Layout::kSlots> slot;
    [[maybe_unused]] uint32_t epilogue_phase = 0;
    float acc[kRowBlocks][kTileN / 2];
    bool pending = false;  // the last block of the tile before is complete, but still in its registers
    WorkTile tile, following;
    const auto hand_over = [&](auto block) {
      constexpr int i = block.value;
      if constexpr (kScaleBias) {
        barrier_wait(&s.epilogue.full, epilogue_phase);
        apply<kTileN>(s.epilogue.stage, acc[i], 0, (consumer + i * kConsumers) * 64, warp, lane);
      }
#pragma unroll
      for (int part = 0; part < Layout::kParts; ++part) {
        uint8_t* smem_out = s.smem_out[consumer] + slot.stage * Layout::kPartBytes;
        bool fetches = false;
        if constexpr (kFetchesOld) fetches = p.accumulate;
        barrier_wait(&s.out_empty[consumer][slot.stage], slot.phase ^ (fetches ? 0 : 1));
        if (kFetchesOld && fetches && (p.fetch_all || (i == 0 && part < Layout::kSlots)))
          store_to_smem<Layout, Out, kFetchesOld>(acc[i], smem_out, part, warp, lane);
        else store_to_smem<Layout, Out>(acc[i], smem_out, part, warp, lane);
        ptx::async_proxy_fence();
        if constexpr (!kWholeWarp) __syncwarp();
        if (kWholeWarp || lane == 0) barrier_arrive(&s.out_full[consumer][slot.stage]);
        slot.advance();
        if (Layout::kParts % Layout::kSlots == 0)
          slot.stage = (part + 1) % Layout::kSlots;  // unchanged, but known to the compiler
      }
    };
    const auto end_tile = [&] {
      if constexpr (kScaleBias) {
        barrier_arrive(&s.epilogue.empty);
        epilogue_phase ^= 1;
      }
    };
    const auto end_tile_before = [&] {
      if (!pending) return;
      hand_over(std::integral_constant<int, kRowBlocks - 1>());
      end_tile();
      pending = false;
    };
    // A tile whose depth is shared is complete only after all slices.
    const auto done = [&](auto block) {
      if constexpr (kSplits)
        if (tile.slice.bits) return;
      hand_over(block);
    };
    const auto share = [&](int blocks) {
      if (tile.slice.partial())
        return leave_sums<GroupedGemmKernel>(acc, p.split_k, tile.slice, consumer, blocks, lane);
      add_sums<GroupedGemmKernel>(acc, p.split_k, tile.slice, consumer, blocks, lane);
      hand_over(std::integral_constant<int, 0>());
    };
    bool more = tiles.next(tile);
    const auto look_ahead = [&] { more = tiles.next(following); };
    for (; more; tile = following) {
      const int mine = row_blocks(tile, consumer);
      if (mine == kRowBlocks) {
        if constexpr (kNarrows) {
          if (narrow(tile, p))
            multiply<GroupedGemmKernel, kRowBlocks, kNarrowColumns>(acc, s, state, tile, p, consumer, lane,
                                                                    end_tile_before, look_ahead, done);
          else
            multiply<GroupedGemmKernel, kRowBlocks>(acc, s, state, tile, p, consumer, lane, end_tile_before, look_ahead,
                                                    done);
        } else {
          multiply<GroupedGemmKernel, kRowBlocks>(acc, s, state, tile, p, consumer, lane, end_tile_before, look_ahead,
                                                  done);
        }
        if constexpr (kSplits)
          if (tile.slice.bits) share(kRowBlocks);
        if (kRowBlocks == 2) pending = stored_blocks(tile, consumer) > 0;
        else end_tile();
      } else if (mine > 0) {
        multiply<GroupedGemmKernel, 1>(acc, s, state, tile, p, consumer, lane, end_tile_before, look_ahead, done);
        if constexpr (kSplits)
          if (tile.slice.bits) share(1);
        end_tile();
      } else {
        end_tile_before();
        skip<GroupedGemmKernel>(s, state, k_blocks_of<GroupedGemmKernel>(tile, p), lane);
        if constexpr (kScaleBias) barrier_wait(&s.epilogue.full, epilogue_phase);
        end_tile();
        look_ahead();
      }
    }
    end_tile_before();
  }

  DEVICE static void run(uint8_t* shared, const Params& p) {
    static_assert(EpilogueOf<Epilogue, GroupedGemmKernel> && GroupsOf<Groups, GroupedGemmKernel>);
    auto& s = *reinterpret_cast<Storage*>(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = kCluster > 1 ? ptx::cluster_rank() : 0;
    if (threadIdx.x == 0) {
      init(s);
      tma::prefetch_map(&p.a);
      tma::prefetch_map(&p.b);
      tma::prefetch_map(&p.out);
      if constexpr (Scaling::kScaled) Scaling::prefetch_maps(p);
    }
    if (RowsArrive<Groups> || p.neighbours.beside) ptx::begin_beside_earlier_kernel();
    else ptx::wait_for_earlier_kernels();
    if (warp == 1) Groups::template fill<GroupedGemmKernel>(s, p, threadIdx.x % 32);
    __syncthreads();
    if constexpr (kCluster > 1) ptx::cluster_sync();

    if (warp < 4 || (kApart && warp >= kConsumersEnd)) {
      ptx::registers_decrease<kProducerRegisters>();
      if (warp == 0) {
        Groups::template produce<GroupedGemmKernel>(s, p, rank);
      } else if (warp == 1) {
        Groups::template fetch<GroupedGemmKernel>(s, p);
      } else if (kWholeWarp || ptx::elect_one()) {
        const int store_warp = warp - (kApart && warp >= kConsumersEnd ? kConsumersEnd - 2 : 2);
        constexpr int kStoreThreads = kWholeWarp ? Epilogue::kStoreWarps : 1;
        Epilogue::template store_tiles<GroupedGemmKernel>(s, p, store_warp / kStoreThreads, store_warp % kStoreThreads);
      }
      __syncwarp();
    } else {
      ptx::registers_increase<kConsumerRegisters>();
      if constexpr (kVariant.swap_ab) consume_swap_ab<GroupedGemmKernel>(s, p, warp / 4 - 1);
      else if constexpr (Scaling::kScaled) consume_scaled<GroupedGemmKernel>(s, p, warp / 4 - 1);
      else consume(s, p, warp / 4 - 1);
    }
    if constexpr (kCluster > 1) ptx::cluster_sync();
    if constexpr (RowsArrive<Groups>) ptx::wait_for_earlier_kernels();
  }

 private:
  static constexpr int kConsumersEnd = 4 * (1 + kConsumers);  // the warp behind them
  // Two scales for each element leave less beside the accumulators.
  static constexpr bool kScarce = Scaling::kScaled && kRaggedDepth;
  static constexpr int kProducerRegisters = kWholeWarp         ? Epilogue::kRegisters
                                            : kScarce          ? 56
                                            : Scaling::kScaled ? 72
                                            : kSpareRegisters  ? 120
                                                               : 56;
  static constexpr int kConsumerRegisters = kApart             ? 256 - Epilogue::kRegisters
                                            : kWholeWarp       ? (504 - Epilogue::kRegisters) / 2
                                            : kScarce          ? 224
                                            : Scaling::kScaled ? 216
                                            : kSpareRegisters  ? 192
                                                               : 224;
};

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1) grouped_gemm_kernel(const __grid_constant__ typename K::Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  K::run(shared, p);
}

}  // namespace fusible
