// D = A @ B on Hopper in BF16 with float32 accumulation: A (M, K) K-major; B (N, K) K-major (nt) or (K, N) N-major (nn), which the
// tensor core transposes. Warp-specialised and persistent, with the scheduler, the clusters and the epilogue of the FP8 GEMM.
#pragma once
#include "dj/epilogue/store_rows.cuh"
#include "dj/kernels/roles.cuh"
#include "dj/mma/wgmma.cuh"
#include "dj/ptx/cluster.cuh"
#include "dj/ptx/dependent_launch.cuh"
#include "dj/ptx/registers.cuh"

namespace dj {

struct Bf16GemmArguments {
    Output d;
    Shape shape;
    uint32_t k_blocks;
    uint32_t reads_b_once;  // or so close together that it need not stay in L2
};

template <uint32_t kBlockM, uint32_t kBlockN, uint32_t kStages, uint32_t kCluster, bool kNMajorB, class Product>
struct Bf16Gemm {
    static constexpr uint32_t kBlockK = 64;                          // 128 bytes
    static constexpr uint32_t kConsumers = kBlockM >= 128 ? 2 : 1;   // warpgroups
    static constexpr uint32_t kWaves = kBlockM / (64 * kConsumers);  // products of 64 rows per warpgroup
    static constexpr uint32_t kThreads = (kConsumers + 1) * kWarpgroup;
    static constexpr uint32_t kConsumerWarps = kConsumers * 4;

    static constexpr uint32_t kBytesA = kBlockM * 128;
    static constexpr uint32_t kBytesB = kBlockN * 128;
    static constexpr uint32_t kBoxBytes = 64 * 128;  // of an N-major B: 64 k of 64 columns
    static constexpr uint32_t kBytesStrip = 16 * kStripPitch<kBlockN>;

    // Shared memory, in this order; spec.kernel_set adds it up for the host.
    static constexpr uint32_t kOffsetB = kStages * kBytesA;
    static constexpr uint32_t kOffsetStrips = kOffsetB + kStages * kBytesB;
    static constexpr uint32_t kOffsetFull = kOffsetStrips + kConsumerWarps * kBytesStrip;
    static constexpr uint32_t kOffsetEmpty = kOffsetFull + kStages * 8;
    static constexpr uint32_t kOffsetGroups = kOffsetFull + kBarrierBytes;
    static constexpr uint32_t kSharedBytes = kSwizzleRepeat + kOffsetGroups + sizeof(GroupTable);
    static_assert(kStages * 16 <= kBarrierBytes);
    static_assert(kBlockN % 64 == 0 && kWaves * kBlockN <= 256, "boxes of 64 columns, and sums that fit the registers");
    static_assert(kCluster == 1 || (kCluster == 2 && kBlockM >= 128), "a warpgroup of products, or one half of them each");

    __device__ static void run(const TensorMap& map_a, const TensorMap& map_b, const Bf16GemmArguments& arguments) {
        extern __shared__ uint8_t shared_raw[];
        uint8_t* shared = align_to_swizzle(shared_raw);
        GroupTable& groups = *reinterpret_cast<GroupTable*>(shared + kOffsetGroups);
        const uint32_t base = shared_address(shared);
        const uint32_t warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
        const uint32_t warp = warp_uniform(threadIdx.x / kWarp);

        // --- barriers and group starts
        if (threadIdx.x == 0) init_stages<kStages>(base + kOffsetFull, base + kOffsetEmpty, 1, kCluster * kConsumerWarps);
        if (warp == kConsumerWarps && elect_one()) {
            prefetch_map(map_a);
            prefetch_map(map_b);
        }
        wait_for_kernels_before();
        if (warp == 1 && arguments.shape.counts_rows()) groups.count(arguments.shape, kBlockM);
        __syncthreads();
        if constexpr (kCluster > 1) cluster_sync();  // no copy for a block whose barriers are not ready

        Scheduler scheduler(arguments.shape, groups, blockIdx.x / kCluster, gridDim.x / kCluster);
        if (warpgroup == kConsumers) {
            if constexpr (kConsumers == 2) lower_registers_to<kProducerRegisters>();
            if (warp == kConsumerWarps) produce(map_a, map_b, arguments, scheduler, base);
        } else {
            if constexpr (kConsumers == 2) raise_registers_to<kConsumerRegisters>();
            consume(arguments, scheduler, shared, base, warpgroup, warp);
        }
    }

   private:
    // A tile of the scheduler holds those of all blocks of a cluster, side by side; the last of them may lie outside D.
    using Scheduler = TileScheduler<kBlockM, kBlockN * kCluster>;
    using Ring = StageRing<kStages>;

    __device__ static bool next_tile(Scheduler& scheduler, Tile& tile) {
        if (!scheduler.next(tile)) return false;
        if constexpr (kCluster > 1) tile.column += cluster_rank() * kBlockN;
        return true;
    }

    __device__ static void produce(const TensorMap& map_a, const TensorMap& map_b, const Bf16GemmArguments& arguments,
                                   Scheduler& scheduler, uint32_t base) {
        const bool issues = elect_one();
        const uint64_t policy = evict_first();
        const uint32_t share =
            kCluster > 1 ? cluster_rank() * (kBlockM / kCluster) : 0;  // of the rows of A, that this block loads
        Ring ring;
        Tile tile;
        while (next_tile(scheduler, tile)) {
            if (scheduler.is_idle(tile)) continue;
#pragma unroll 1
            for (uint32_t block = 0; block < arguments.k_blocks; ++block, ring.advance()) {
                const uint32_t full = base + kOffsetFull + ring.stage * 8;
                const uint32_t b = base + kOffsetB + ring.stage * kBytesB;
                barrier_wait(base + kOffsetEmpty + ring.stage * 8, ring.phase ^ 1);
                if (issues) {
                    barrier_arrive_expect(full, kBytesA + kBytesB);
                    if constexpr (kNMajorB) {
#pragma unroll
                        for (uint32_t column = 0; column < kBlockN; column += 64)
                            load_box(map_b, full, b + column / 64 * kBoxBytes, tile.column + column, block * kBlockK, tile.group);
                    } else if (arguments.reads_b_once) {
                        load_box(map_b, full, b, block * kBlockK, tile.column, tile.group, policy);
                    } else {
                        load_box(map_b, full, b, block * kBlockK, tile.column, tile.group);
                    }
                    const uint32_t a = base + ring.stage * kBytesA;
                    if constexpr (kCluster == 1) {
                        load_box(map_a, full, a, block * kBlockK, tile.row, tile.a_group);
                    } else {
                        load_box_multicast(map_a, full, a + share * 128, block * kBlockK, tile.row + share, tile.a_group,
                                           (1 << kCluster) - 1);
                    }
                }
                __syncwarp();  // a lane that fell behind by a round would take its parity for an older one
            }
        }
        if constexpr (kCluster > 1) {  // no block leaves while consumers of another may still reach its barriers
            for (uint32_t i = 0; i < kStages; ++i, ring.advance())
                barrier_wait(base + kOffsetEmpty + ring.stage * 8, ring.phase ^ 1);
        }
    }

    using Totals = float[kWaves][kBlockN / 2];

    // Waits for a stage and issues its products, which start the totals or add to them.
    __device__ static void multiply(uint32_t base, const Ring& ring, uint32_t warpgroup, Totals& totals, bool accumulate) {
        const uint32_t stage = ring.stage;
        barrier_wait(base + kOffsetFull + stage * 8, ring.phase);
        const uint32_t b_address = base + kOffsetB + stage * kBytesB;
        const uint64_t b = kNMajorB ? descriptor_n_major(b_address, kBoxBytes) : descriptor(b_address);
        // 16 k of an N-major tile are 16 rows of 128 bytes.
        constexpr uint32_t kStepB = kNMajorB ? 16 * 128 / 16 : kDescriptorStep;
        hold_all(totals);
        products_begin();
#pragma unroll
        for (uint32_t wave = 0; wave < kWaves; ++wave) {
            const uint64_t a = descriptor(base + stage * kBytesA + (warpgroup * kWaves + wave) * (64 * 128));
#pragma unroll
            for (uint32_t k = 0; k < 128 / kProductBytes; ++k)
                Product::issue(a + k * kDescriptorStep, b + k * kStepB, totals[wave], k != 0 || accumulate);
        }
        products_commit();
        hold_all(totals);
    }

    __device__ static void hold_all(Totals& totals) {
#pragma unroll
        for (uint32_t wave = 0; wave < kWaves; ++wave) hold(totals[wave]);
    }

    // Gives a stage back: `empty` is its barrier, of the block of the cluster that this lane tells.
    __device__ static void release(uint32_t empty) {
        if constexpr (kCluster == 1) {
            barrier_arrive_if(lane_id() == 0, empty);
        } else {
            barrier_arrive_in_cluster_if(lane_id() < kCluster, empty);
        }
    }

    using Pairs = uint32_t[kWaves][kBlockN / 4];  // a finished tile, of bf16

    __device__ static void store(const Bf16GemmArguments& arguments, const Tile& tile, uint32_t warp_row, uint8_t* strip,
                                 const Pairs& pairs) {
#pragma unroll
        for (uint32_t wave = 0; wave < kWaves; ++wave) {
            const uint32_t row = tile.row + warp_row + wave * 64;
            if (row >= tile.row_end || (kCluster > 1 && tile.column >= arguments.shape.n)) continue;
            uint16_t* rows = arguments.d.at(tile.a_group, row, tile.column);
            store_rows<kBlockN>(pairs[wave], strip, rows, arguments.d.row_stride, tile.row_end - row,
                                arguments.shape.n - tile.column);
        }
    }

    __device__ static void consume(const Bf16GemmArguments& arguments, Scheduler& scheduler, uint8_t* shared, uint32_t base,
                                   uint32_t warpgroup, uint32_t warp) {
        const uint32_t warp_row = warpgroup * (64 * kWaves) + warp % 4 * 16;  // of the tile, first wave
        uint8_t* strip = shared + kOffsetStrips + warp * kBytesStrip;
        uint32_t empty = base + kOffsetEmpty;
        if constexpr (kCluster > 1) empty = address_in(lane_id() % kCluster, empty);
        Ring ring;
        Tile tile, before;  // one is stored while the first products of the next run
        bool stores = false;
        Totals totals;
        Pairs pairs;
        while (next_tile(scheduler, tile)) {
            if (scheduler.is_idle(tile)) continue;
            // Barrier of the stage whose products are under way. Kept instead of a copy of the ring, with which the compiler would no
            // longer keep stages in uniform registers.
            uint32_t done = empty + ring.stage * 8;
            multiply(base, ring, warpgroup, totals, false);
            ring.advance();
            if (stores) store(arguments, before, warp_row, strip, pairs);

            // The products of one stage are in flight while the stage before it is given back.
#pragma unroll 1
            for (uint32_t block = 1; block < arguments.k_blocks; ++block) {
                multiply(base, ring, warpgroup, totals, true);
                products_wait<1>();
                release(done);
                done = empty + ring.stage * 8;
                ring.advance();
            }
            products_wait<0>();
            release(done);
            hold_all(totals);
#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave) to_bf16_pairs(totals[wave], pairs[wave]);
            before = tile;
            stores = true;
        }
        if (stores) store(arguments, before, warp_row, strip, pairs);
    }
};

}  // namespace dj
