// The grouped GEMM: bf16 or fp16 operands, fp32 accumulation, output in the operands' type or fp32.
//
// A persistent kernel of three warpgroups a block. In the first, one thread issues the copies of A and B (mainloop.cuh), one warp
// fetches bias and scales, and two threads store the tile before (epilogue.cuh); the other two warpgroups multiply, each every second
// block of 64 rows of the tile.
#pragma once
#include "device/mainloop.cuh"

namespace fusible {

// An epilogue says who finishes a deposit, and how: one thread that copies it to where it belongs (this one), or kFinishers whole warps,
// which need registers for it (epilogue_activation.cuh). More than one for a consumer are a warpgroup of their own.
struct StoreEpilogue {
  using Params = GemmParams;
  static constexpr int kFinishers = 0, kRegisters = 72;
  struct Scratch {};  // of shared memory
  template <class K>
  DEVICE static void finish(typename K::Storage& s, const Params& p, int rank, int consumer, int) {
    K::finish(s, p, rank, consumer);
  }
};

template <class T_, class A_, class B_, class Out_, bool kAffineValue, TileVariant kVariant, class Epilogue = StoreEpilogue>
struct GroupedGemmKernel {
  using T = T_;
  using A = A_;
  using B = B_;
  using Params = typename Epilogue::Params;
  static constexpr int kTileM = kVariant.tile_m, kTileN = kVariant.tile_n, kStages = kVariant.stages, kCluster = kVariant.cluster();
  static constexpr int kRowBlocks = kTileM / (64 * kConsumers);  // of a consumer
  static constexpr int kDepositBytes = kTileN == 192 ? 24576 : 32768 * kTileN * kRowBlocks / 256;
  static constexpr bool kAffine = kAffineValue, kRaggedDepth = A::kRaggedDepth;
  static constexpr bool kWholeWarp = Epilogue::kFinishers > 0, kApart = Epilogue::kFinishers > 1;
  static constexpr int kThreads = 128 * (1 + kConsumers + kApart);
  using Scheduler = TileScheduler<kVariant, !kRaggedDepth>;
  using Out = Out_;
  using Layout = DepositLayout<Out, kTileN, kDepositBytes>;

  struct NoAffine {};
  struct Affine {
    AffineStage<kTileM, kTileN> stage;
    uint64_t full, empty;
  };
  struct __align__(1024) Storage {
    Stages<kTileM, kTileN, kStages> stages;
    uint8_t deposits[kConsumers][Layout::kBytes];
    uint64_t full[kStages], empty[kStages];
    uint64_t deposited[kConsumers][Layout::kSlots], collected[kConsumers][Layout::kSlots];
    [[no_unique_address]] std::conditional_t<kAffine, Affine, NoAffine> affine;
    [[no_unique_address]] typename Epilogue::Scratch scratch;
    TaskQueue tasks;
    GroupTable groups;
  };
  static_assert(sizeof(Storage) <= kSharedMemoryLimit, "shared memory of a block");

  DEVICE static void init(Storage& s) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kCluster * kConsumers * 4);  // every consumer warp of the cluster
    }
    for (int i = 0; i < kConsumers * Layout::kSlots; ++i) {
      barrier_init(&s.deposited[0][i], kWholeWarp ? 128 : 4);  // the threads or warps of a consumer
      barrier_init(&s.collected[0][i], kWholeWarp ? 32 * Epilogue::kFinishers : 1);
    }
    if constexpr (kAffine) {
      barrier_init(&s.affine.full, 32);
      barrier_init(&s.affine.empty, kConsumers * 128);
    }
    s.tasks.init(kCluster * (1 + 4 * kConsumers + kConsumers * max(1, Epilogue::kFinishers) + (kAffine ? 1 : 0)));  // producers, consumer warps, finishers, fetchers
    barrier_init_fence();
  }

  // How many of the consumer's blocks of 64 rows exist.
  DEVICE static int row_blocks(const Tile& tile, int consumer) {
    return tile.idle ? 0 : max(0, (tile.rows - consumer * 64 + 64 * kConsumers - 1) / (64 * kConsumers));
  }

  DEVICE static void consume(Storage& s, const Params& p, int rank, int consumer) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    Scheduler tiles(s.groups, s.tasks, p.shape, rank, true);
    Ring<kStages> ring;
    Ring<Layout::kSlots> slot;
    [[maybe_unused]] uint32_t affine_phase = 0;
    for (Tile tile; tiles.next(tile);) {
      const int mine = row_blocks(tile, consumer);
      float acc[kRowBlocks][kTileN / 2];
      [[maybe_unused]] bool affine_ready = false;
      const auto done = [&](auto block) {
        constexpr int i = block.value;
        if constexpr (kAffine) {
          if (!affine_ready) barrier_wait(&s.affine.full, affine_phase);
          affine_ready = true;
          apply(s.affine.stage, acc[i], (consumer + i * kConsumers) * 64, warp, lane);
        }
#pragma unroll
        for (int part = 0; part < Layout::kParts; ++part) {
          barrier_wait(&s.collected[consumer][slot.stage], slot.phase ^ 1);
          deposit<Layout, Out>(acc[i], s.deposits[consumer] + slot.stage * Layout::kPartBytes, part, warp, lane);
          ptx::async_proxy_fence();
          if constexpr (!kWholeWarp) __syncwarp();
          if (kWholeWarp || lane == 0) barrier_arrive(&s.deposited[consumer][slot.stage]);
          slot.advance();
        }
      };
      if (mine == kRowBlocks) multiply<GroupedGemmKernel, kRowBlocks>(acc, s, ring, tile, p, consumer, lane, done);
      else if (mine > 0) multiply<GroupedGemmKernel, 1>(acc, s, ring, tile, p, consumer, lane, done);
      else skip<GroupedGemmKernel>(s, ring, k_blocks_of<GroupedGemmKernel>(tile, p), lane);
      if constexpr (kAffine)
        if (mine == 0) barrier_wait(&s.affine.full, affine_phase);
      if constexpr (kAffine) {
        barrier_arrive(&s.affine.empty);
        affine_phase ^= 1;
      }
    }
  }

  // One thread for each consumer. A part's room is given back once it has been read: while the next part is being copied, if there is
  // room for two.
  DEVICE static void finish(Storage& s, const Params& p, int rank, int consumer) {
    constexpr int kBehind = Layout::kSlots > 1 ? 1 : 0;
    Scheduler tiles(s.groups, s.tasks, p.shape, rank, false);
    Ring<Layout::kSlots> slot, read;
    Destination to{.map = &p.out, .policy = tma::policy_evict_first(), .accumulate = p.accumulate};
    const auto give_back = [&] {
      barrier_arrive(&s.collected[consumer][read.stage]);
      read.advance();
    };
    for (Tile tile; tiles.next(tile);) {
      const int parts = row_blocks(tile, consumer) * Layout::kParts;
      to.column = tile.column * kTileN;
      for (int part = 0; part < parts; ++part) {
        const int row = tile.row + (consumer + part / Layout::kParts * kConsumers) * 64;
        to.map_row[0] = kRaggedDepth ? row : p.shape.tokens - tile.tokens + row;
        to.map_row[1] = kRaggedDepth ? tile.place.near : tile.tokens_start + tile.tokens;
        to.map_row[2] = kRaggedDepth ? tile.place.far : 0;
        barrier_wait(&s.deposited[consumer][slot.stage], slot.phase);
        store_part<Layout>(to, s.deposits[consumer] + slot.stage * Layout::kPartBytes, part % Layout::kParts);
        slot.advance();
        tma::wait_read<kBehind>();
        if (part >= kBehind) give_back();
      }
      if (kBehind && parts > 0) {
        tma::wait_read<0>();
        give_back();
      }
    }
    tma::wait_all();
  }

  // One warp: bias and scales of every tile, while the consumers multiply it.
  DEVICE static void fetch_affine(Storage& s, const Params& p, int rank) {
    const int lane = threadIdx.x % 32;
    Scheduler tiles(s.groups, s.tasks, p.shape, rank, true);
    uint32_t phase = 0;
    for (Tile tile; tiles.next(tile); phase ^= 1) {
      barrier_wait(&s.affine.empty, phase ^ 1);
      fill(s.affine.stage, p.affine, tile, lane);
      barrier_arrive(&s.affine.full);
    }
  }

  DEVICE static void run(uint8_t* shared, const Params& p) {
    auto& s = *reinterpret_cast<Storage*>(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = kCluster > 1 ? ptx::cluster_rank() : 0;
    if (threadIdx.x == 0) {
      init(s);
      tma::prefetch_map(&p.a);
      tma::prefetch_map(&p.b);
      tma::prefetch_map(&p.out);
    }
    if (warp == 1) Scheduler::fill(s.groups, p.source, p.shape, threadIdx.x % 32);
    __syncthreads();
    if constexpr (kCluster > 1) ptx::cluster_sync();

    if (warp < 4) {
      ptx::registers_decrease<kProducerRegisters>();
      if (warp == 0) {
        if (threadIdx.x % 32 == 0) produce<GroupedGemmKernel>(s, p, rank);
      } else if (warp == 1) {
        if constexpr (kAffine) fetch_affine(s, p, rank);
      } else if (!kApart && (kWholeWarp || threadIdx.x % 32 == 0)) {
        Epilogue::template finish<GroupedGemmKernel>(s, p, rank, warp - 2, 0);
      }
      __syncwarp();
    } else if (kApart && warp >= 4 * (1 + kConsumers)) {
      ptx::registers_decrease<kFinisherRegisters>();
      const int finisher = warp - 4 * (1 + kConsumers);
      Epilogue::template finish<GroupedGemmKernel>(s, p, rank, finisher / max(1, Epilogue::kFinishers), finisher % max(1, Epilogue::kFinishers));
    } else {
      ptx::registers_increase<kConsumerRegisters>();
      consume(s, p, rank, warp / 4 - 1);
    }
    if constexpr (kCluster > 1) ptx::cluster_sync();
  }

 private:
  static constexpr int kProducerRegisters = kApart ? 40 : kWholeWarp ? Epilogue::kRegisters : kTileN * kRowBlocks > 256 ? 40 : 72;
  static constexpr int kFinisherRegisters = 104;  // of a warpgroup of their own
  static constexpr int kConsumerRegisters = kApart ? 184 : kWholeWarp ? (504 - Epilogue::kRegisters) / 2 : kTileN * kRowBlocks > 256 ? 232 : 216;
};

template <class K>
__global__ void __launch_bounds__(K::kThreads, 1) grouped_gemm_kernel(const __grid_constant__ typename K::Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  K::run(shared, p);
}

}  // namespace fusible
