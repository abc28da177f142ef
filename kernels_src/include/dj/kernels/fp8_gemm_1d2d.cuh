// D = A @ B.T on Hopper: A and B in E4M3, K-major; one float32 scale per row and 128 columns of A, one per 128 x 128 block of B.
//
// Warp-specialised and persistent. One thread of the last warpgroup keeps the copy engine busy over a ring of stages; the other
// warpgroups multiply. The tensor core sums FP8 products with fewer bits than float32, so the sum of each k-block (128 columns)
// is scaled and added to float32 totals on the CUDA cores; while one warpgroup does that, the other one multiplies.
#pragma once
#include "dj/epilogue/store_rows.cuh"
#include "dj/mma/wgmma.cuh"
#include "dj/ptx/copy.cuh"
#include "dj/ptx/registers.cuh"
#include "dj/scheduler/layout.cuh"

namespace dj {

struct GemmArguments {
    const float* b_scales;  // (groups, ceil(N / 128), ceil(K / 128))
    int64_t b_scales_group_stride;
    int64_t b_scales_row_stride;
    Output d;
    Shape shape;
    uint32_t k_blocks;
};

template <uint32_t kBlockM, uint32_t kBlockN, uint32_t kStages, class Product>
struct Fp8Gemm1d2d {
    static constexpr uint32_t kBlockK = kScaleBlock;
    static constexpr uint32_t kConsumers = kBlockM >= 128 ? 2 : 1;  // warpgroups
    static constexpr uint32_t kWaves = kBlockM / (64 * kConsumers);  // products of 64 rows per warpgroup
    static constexpr uint32_t kThreads = (kConsumers + 1) * kWarpgroup;
    static constexpr uint32_t kConsumerWarps = kConsumers * 4;

    // Registers per thread: 65536 / 384 = 168 at entry; the producer needs few, the two consumers get what it gives up.
    static constexpr uint32_t kProducerRegisters = 40;
    static constexpr uint32_t kConsumerRegisters = 232;

    static constexpr uint32_t kBytesA = kBlockM * kBlockK;
    static constexpr uint32_t kBytesB = kBlockN * kBlockK;
    static constexpr uint32_t kBytesScales = kBlockM * 4;
    static constexpr uint32_t kBytesStrip = 16 * kStripPitch<kBlockN>;

    // Shared memory, in this order; spec.kernel_set.gemm_shared_memory_bytes adds it up for the host.
    static constexpr uint32_t kOffsetB = kStages * kBytesA;
    static constexpr uint32_t kOffsetScales = kOffsetB + kStages * kBytesB;
    static constexpr uint32_t kOffsetStrips = kOffsetScales + kStages * kBytesScales;
    static constexpr uint32_t kOffsetFull = kOffsetStrips + kConsumerWarps * kBytesStrip;
    static constexpr uint32_t kOffsetEmpty = kOffsetFull + kStages * 8;
    static constexpr uint32_t kOffsetScaleB = kOffsetEmpty + kStages * 8;
    static constexpr uint32_t kOffsetGroups = kOffsetFull + 256;
    static_assert(kStages * 20 <= 256, "barriers and B scales have 256 bytes");
    static_assert(kBlockN % 16 == 0 && kScaleBlock % kBlockN == 0, "a tile meets one B scale per k-block");

    // Position in the ring of stages: full and empty phases alternate each round.
    struct Ring {
        uint32_t stage = 0;
        uint32_t phase = 0;
        __device__ void advance() {
            if (++stage == kStages) {
                stage = 0;
                phase ^= 1;
            }
        }
    };

    __device__ static void run(const TensorMap& map_a, const TensorMap& map_b, const TensorMap& map_scales,
                               const GemmArguments& arguments) {
        extern __shared__ uint8_t shared_raw[];
        // Swizzled tiles repeat every 1024 bytes; the runtime gives 16-byte alignment only.
        uint8_t* shared = shared_raw + (1024 - shared_address(shared_raw) % 1024) % 1024;
        uint32_t* group_starts = reinterpret_cast<uint32_t*>(shared + kOffsetGroups);
        const uint32_t base = shared_address(shared);
        const uint32_t warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
        const uint32_t warp = warp_uniform(threadIdx.x / kWarp);

        // --- barriers and group starts
        if (threadIdx.x == 0) {
            for (uint32_t stage = 0; stage < kStages; ++stage) {
                barrier_init(base + kOffsetFull + stage * 8, 2);  // the copy engine's bytes, the B scale
                barrier_init(base + kOffsetEmpty + stage * 8, kConsumerWarps);
            }
            fence_barrier_init();
        }
        if (warp == kConsumerWarps && elect_one()) {
            prefetch_map(map_a);
            prefetch_map(map_b);
            prefetch_map(map_scales);
        }
        if (warp == 1 && arguments.shape.counts_rows()) Scheduler::count(arguments.shape, group_starts);
        __syncthreads();

        Scheduler scheduler(arguments.shape, group_starts);
        if (warpgroup == kConsumers) {
            if constexpr (kConsumers == 2) lower_registers_to<kProducerRegisters>();
            if (warp == kConsumerWarps && elect_one()) produce(map_a, map_b, map_scales, arguments, scheduler, base);
        } else {
            if constexpr (kConsumers == 2) raise_registers_to<kConsumerRegisters>();
            consume(arguments, scheduler, shared, base, warpgroup, warp);
        }
    }

   private:
    using Scheduler = TileScheduler<kBlockM, kBlockN>;

    __device__ static void produce(const TensorMap& map_a, const TensorMap& map_b, const TensorMap& map_scales,
                                   const GemmArguments& arguments, Scheduler& scheduler, uint32_t base) {
        Ring ring;
        Tile tile;
        while (scheduler.next(tile)) {
            const float* b_scales = arguments.b_scales + tile.group * arguments.b_scales_group_stride +
                                    tile.column / kScaleBlock * arguments.b_scales_row_stride;
#pragma unroll 1
            for (uint32_t block = 0; block < arguments.k_blocks; ++block, ring.advance()) {
                const uint32_t full = base + kOffsetFull + ring.stage * 8;
                barrier_wait(base + kOffsetEmpty + ring.stage * 8, ring.phase ^ 1);
                barrier_arrive_expect(full, kBytesA + kBytesB + kBytesScales);
                load_box(map_b, full, base + kOffsetB + ring.stage * kBytesB, block * kBlockK, tile.column, tile.group);
                load_box(map_a, full, base + ring.stage * kBytesA, block * kBlockK, tile.row, tile.a_group);
                load_box(map_scales, full, base + kOffsetScales + ring.stage * kBytesScales, tile.row, block, tile.a_group);
                load_float(full, base + kOffsetScaleB + ring.stage * 4, b_scales + block);
            }
        }
    }

    __device__ static void consume(const GemmArguments& arguments, Scheduler& scheduler, uint8_t* shared, uint32_t base,
                                   uint32_t warpgroup, uint32_t warp) {
        const uint32_t lane = lane_id();
        const uint32_t warp_row = warpgroup * (64 * kWaves) + warp % 4 * 16;  // of the tile, first wave
        uint8_t* strip = shared + kOffsetStrips + warp * kBytesStrip;
        Ring ring;
        Tile tile;
        while (scheduler.next(tile)) {
            float totals[kWaves][kBlockN / 2];
#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave)
#pragma unroll
                for (uint32_t i = 0; i < kBlockN / 2; ++i) totals[wave][i] = 0.0f;

            // --- main loop
#pragma unroll 1
            for (uint32_t block = 0; block < arguments.k_blocks; ++block, ring.advance()) {
                barrier_wait(base + kOffsetFull + ring.stage * 8, ring.phase);
                const float scale_b = *reinterpret_cast<const float*>(shared + kOffsetScaleB + ring.stage * 4);
                const float* scales =
                    reinterpret_cast<const float*>(shared + kOffsetScales + ring.stage * kBytesScales) + warp_row + lane / 4;
                const uint64_t b = descriptor(base + kOffsetB + ring.stage * kBytesB);
#pragma unroll
                for (uint32_t wave = 0; wave < kWaves; ++wave) {
                    const uint64_t a =
                        descriptor(base + ring.stage * kBytesA + (warpgroup * kWaves + wave) * (64 * kBlockK));
                    const float upper = scales[wave * 64] * scale_b;
                    const float lower = scales[wave * 64 + 8] * scale_b;
                    float sums[kBlockN / 2];
                    hold(sums);
                    products_begin();
#pragma unroll
                    for (uint32_t k = 0; k < kBlockK / kProductK; ++k)
                        Product::issue(a + k * kDescriptorStep, b + k * kDescriptorStep, sums, k != 0);
                    products_commit();
                    hold(sums);
                    products_wait<0>();
                    if (wave == kWaves - 1 && lane == 0) barrier_arrive(base + kOffsetEmpty + ring.stage * 8);
#pragma unroll
                    for (uint32_t i = 0; i < kBlockN / 2; i += 4) {
                        totals[wave][i] += upper * sums[i];
                        totals[wave][i + 1] += upper * sums[i + 1];
                        totals[wave][i + 2] += lower * sums[i + 2];
                        totals[wave][i + 3] += lower * sums[i + 3];
                    }
                }
            }

            // --- epilogue
#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave) {
                const uint32_t row = tile.row + warp_row + wave * 64;
                if (row >= tile.row_end) continue;
                uint16_t* rows = arguments.d.data + tile.a_group * arguments.d.group_stride + row * arguments.d.row_stride + tile.column;
                store_rows<kBlockN>(totals[wave], strip, rows, arguments.d.row_stride, tile.row_end - row,
                                    arguments.shape.n - tile.column);
            }
        }
    }
};

}  // namespace dj
