// D = A @ B on Hopper in BF16 with float32 accumulation: A (M, K) K-major; B (N, K) K-major (nt) or (K, N) N-major (nn), which the
// tensor core transposes. Warp-specialised and persistent, with the scheduler and the epilogue of the FP8 GEMM.
#pragma once
#include "dj/epilogue/store_rows.cuh"
#include "dj/kernels/roles.cuh"
#include "dj/mma/wgmma.cuh"
#include "dj/ptx/dependent_launch.cuh"
#include "dj/ptx/registers.cuh"

namespace dj {

struct Bf16GemmArguments {
    Output d;
    Shape shape;
    uint32_t k_blocks;
};

template <uint32_t kBlockM, uint32_t kBlockN, uint32_t kStages, bool kNMajorB, class Product>
struct Bf16Gemm {
    static constexpr uint32_t kBlockK = 64;  // 128 bytes
    static constexpr uint32_t kConsumers = kBlockM / 64;
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
    static_assert(kBlockM == 64 || kBlockM == 128, "one product of 64 rows per warpgroup");

    __device__ static void run(const TensorMap& map_a, const TensorMap& map_b, const Bf16GemmArguments& arguments) {
        extern __shared__ uint8_t shared_raw[];
        uint8_t* shared = align_to_swizzle(shared_raw);
        GroupTable& groups = *reinterpret_cast<GroupTable*>(shared + kOffsetGroups);
        const uint32_t base = shared_address(shared);
        const uint32_t warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
        const uint32_t warp = warp_uniform(threadIdx.x / kWarp);

        // --- barriers and group starts
        if (threadIdx.x == 0) init_stages<kStages>(base + kOffsetFull, base + kOffsetEmpty, 1, kConsumerWarps);
        if (warp == kConsumerWarps && elect_one()) {
            prefetch_map(map_a);
            prefetch_map(map_b);
        }
        wait_for_kernels_before();
        if (warp == 1 && arguments.shape.counts_rows()) groups.count(arguments.shape, kBlockM);
        __syncthreads();

        Scheduler scheduler(arguments.shape, groups, blockIdx.x, gridDim.x);
        if (warpgroup == kConsumers) {
            if constexpr (kConsumers == 2) lower_registers_to<kProducerRegisters>();
            if (warp == kConsumerWarps) produce(map_a, map_b, arguments, scheduler, base);
        } else {
            if constexpr (kConsumers == 2) raise_registers_to<kConsumerRegisters>();
            consume(arguments, scheduler, shared, base, warpgroup, warp);
        }
    }

   private:
    using Scheduler = TileScheduler<kBlockM, kBlockN>;
    using Ring = StageRing<kStages>;

    __device__ static void produce(const TensorMap& map_a, const TensorMap& map_b, const Bf16GemmArguments& arguments,
                                   Scheduler& scheduler, uint32_t base) {
        const bool issues = elect_one();
        Ring ring;
        Tile tile;
        while (scheduler.next(tile)) {
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
                    } else {
                        load_box(map_b, full, b, block * kBlockK, tile.column, tile.group);
                    }
                    load_box(map_a, full, base + ring.stage * kBytesA, block * kBlockK, tile.row, tile.a_group);
                }
                __syncwarp();  // a lane that fell behind by a round would take its parity for an older one
            }
        }
    }

    __device__ static void issue(uint32_t base, uint32_t stage, uint32_t warpgroup, float (&totals)[kBlockN / 2],
                                 bool accumulate) {
        const uint64_t a = descriptor(base + stage * kBytesA + warpgroup * (64 * 128));
        const uint32_t b_address = base + kOffsetB + stage * kBytesB;
        const uint64_t b = kNMajorB ? descriptor_n_major(b_address, kBoxBytes) : descriptor(b_address);
        // 16 k of an N-major tile are 16 rows of 128 bytes.
        constexpr uint32_t kStepB = kNMajorB ? 16 * 128 / 16 : kDescriptorStep;
        hold(totals);
        products_begin();
#pragma unroll
        for (uint32_t k = 0; k < 128 / kProductBytes; ++k)
            Product::issue(a + k * kDescriptorStep, b + k * kStepB, totals, k != 0 || accumulate);
        products_commit();
        hold(totals);
    }

    __device__ static void consume(const Bf16GemmArguments& arguments, Scheduler& scheduler, uint8_t* shared, uint32_t base,
                                   uint32_t warpgroup, uint32_t warp) {
        const uint32_t warp_row = warp * 16;
        uint8_t* strip = shared + kOffsetStrips + warp * kBytesStrip;
        Ring ring;
        Tile tile;
        while (scheduler.next(tile)) {
            if (scheduler.is_idle(tile)) continue;
            float totals[kBlockN / 2];

            // --- main loop: one product in flight while the stage before it is given back
            uint32_t done = base + kOffsetEmpty + ring.stage * 8;  // barrier of the stage whose product is under way
            barrier_wait(base + kOffsetFull + ring.stage * 8, ring.phase);
            issue(base, ring.stage, warpgroup, totals, false);
            ring.advance();
#pragma unroll 1
            for (uint32_t block = 1; block < arguments.k_blocks; ++block) {
                barrier_wait(base + kOffsetFull + ring.stage * 8, ring.phase);
                issue(base, ring.stage, warpgroup, totals, true);
                products_wait<1>();
                barrier_arrive_if(lane_id() == 0, done);
                done = base + kOffsetEmpty + ring.stage * 8;
                ring.advance();
            }
            products_wait<0>();
            barrier_arrive_if(lane_id() == 0, done);
            hold(totals);

            // --- epilogue
            const uint32_t row = tile.row + warp_row;
            if (row >= tile.row_end) continue;
            uint16_t* rows =
                arguments.d.data + tile.a_group * arguments.d.group_stride + row * arguments.d.row_stride + tile.column;
            store_rows<kBlockN>(totals, strip, rows, arguments.d.row_stride, tile.row_end - row, arguments.shape.n - tile.column);
        }
    }
};

}  // namespace dj
