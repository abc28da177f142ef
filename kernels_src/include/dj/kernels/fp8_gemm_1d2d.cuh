// D = A @ B.T on Hopper: A and B in E4M3, K-major; one float32 scale per row and 128 columns of A, one per 128 x 128 block of B
// (or, with row scales, one per row and 128 columns of B).
//
// Warp-specialised and persistent. One thread of the last warpgroup keeps the copy engine busy over a ring of stages; the other
// warpgroups multiply. The tensor core sums FP8 products with fewer bits than float32, so the sum of each k-block (128 columns)
// is scaled and added to float32 totals on the CUDA cores, while the tensor core works on the next k-block (of this warpgroup
// where registers allow two sums, of the other warpgroup in any case).
#pragma once
#include "dj/epilogue/store_rows.cuh"
#include "dj/kernels/roles.cuh"
#include "dj/mma/wgmma.cuh"
#include "dj/ptx/registers.cuh"

namespace dj {

struct GemmArguments {
    const float* b_scales;  // (groups, ceil(N / 128), ceil(K / 128)); row scales come through a tensor map instead
    int64_t b_scales_group_stride;
    int64_t b_scales_row_stride;
    Output d;
    Shape shape;
    uint32_t k_blocks;
};

template <uint32_t kBlockM, uint32_t kBlockN, uint32_t kStages, bool kRowScales, class Product>
struct Fp8Gemm1d2d {
    static constexpr uint32_t kBlockK = kScaleBlock;
    static constexpr uint32_t kConsumers = kBlockM >= 128 ? 2 : 1;   // warpgroups
    static constexpr uint32_t kWaves = kBlockM / (64 * kConsumers);  // products of 64 rows per warpgroup
    static constexpr uint32_t kThreads = (kConsumers + 1) * kWarpgroup;
    static constexpr uint32_t kConsumerWarps = kConsumers * 4;

    // Two sums in registers beside the totals: with 64 x 192, two waves or a scale per column there is room for one.
    static constexpr bool kOverlaps = kWaves == 1 && kBlockN <= 128 && !kRowScales;

    // B scales that a tile meets in one k-block: a second one where it crosses a multiple of 128 columns. Columns come in chunks
    // of one scale each.
    static constexpr uint32_t kScalesB = kRowScales ? 0 : kScaleBlock % kBlockN == 0 ? 1 : 2;
    static constexpr uint32_t kChunk = kScalesB == 2 ? 64 : kBlockN;
    static constexpr uint32_t kChunks = kBlockN / kChunk;

    static constexpr uint32_t kBytesA = kBlockM * kBlockK;
    static constexpr uint32_t kBytesB = kBlockN * kBlockK;
    static constexpr uint32_t kBytesScales = kBlockM * 4;
    static constexpr uint32_t kBytesRowScales = kRowScales ? kBlockN * 4 : 0;
    static constexpr uint32_t kBytesStrip = 16 * kStripPitch<kBlockN>;

    // Shared memory, in this order; spec.kernel_set.dynamic_shared_memory_bytes adds it up for the host.
    static constexpr uint32_t kOffsetB = kStages * kBytesA;
    static constexpr uint32_t kOffsetScales = kOffsetB + kStages * kBytesB;
    static constexpr uint32_t kOffsetRowScales = kOffsetScales + kStages * kBytesScales;
    static constexpr uint32_t kOffsetStrips = kOffsetRowScales + kStages * kBytesRowScales;
    static constexpr uint32_t kOffsetFull = kOffsetStrips + kConsumerWarps * kBytesStrip;
    static constexpr uint32_t kOffsetEmpty = kOffsetFull + kStages * 8;
    static constexpr uint32_t kOffsetScaleB = kOffsetEmpty + kStages * 8;
    static constexpr uint32_t kOffsetGroups = kOffsetFull + kBarrierBytes;
    static constexpr uint32_t kSharedBytes = kSwizzleRepeat + kOffsetGroups + sizeof(GroupTable);
    static_assert(kStages * (16 + 4 * kScalesB) <= kBarrierBytes, "barriers and B scales have 256 bytes");
    static_assert(kBlockN % 16 == 0 && (kScalesB < 2 || kBlockN == 192), "chunks of 64 columns start at multiples of 64");

    using Ring = StageRing<kStages>;

    struct Maps {
        const TensorMap& a;
        const TensorMap& b;
        const TensorMap& a_scales;
        const TensorMap* b_scales;  // row scales only
    };

    __device__ static void run(const Maps& maps, const GemmArguments& arguments) {
        extern __shared__ uint8_t shared_raw[];
        uint8_t* shared = align_to_swizzle(shared_raw);
        GroupTable& groups = *reinterpret_cast<GroupTable*>(shared + kOffsetGroups);
        const uint32_t base = shared_address(shared);
        const uint32_t warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
        const uint32_t warp = warp_uniform(threadIdx.x / kWarp);

        // --- barriers and group starts
        // A stage is full with the copy engine's bytes and, unless it brings them too, the B scales.
        if (threadIdx.x == 0) init_stages<kStages>(base + kOffsetFull, base + kOffsetEmpty, kRowScales ? 1 : 2, kConsumerWarps);
        if (warp == kConsumerWarps && elect_one()) {
            prefetch_map(maps.a);
            prefetch_map(maps.b);
            prefetch_map(maps.a_scales);
            if constexpr (kRowScales) prefetch_map(*maps.b_scales);
        }
        if (warp == 1 && arguments.shape.counts_rows()) groups.count(arguments.shape, kBlockM);
        __syncthreads();

        Scheduler scheduler(arguments.shape, groups);
        if (warpgroup == kConsumers) {
            if constexpr (kConsumers == 2) lower_registers_to<kProducerRegisters>();
            if (warp == kConsumerWarps && elect_one()) produce(maps, arguments, scheduler, base);
        } else {
            if constexpr (kConsumers == 2) raise_registers_to<kConsumerRegisters>();
            consume(arguments, scheduler, shared, base, warpgroup, warp);
        }
    }

   private:
    using Scheduler = TileScheduler<kBlockM, kBlockN>;

    __device__ static void produce(const Maps& maps, const GemmArguments& arguments, Scheduler& scheduler, uint32_t base) {
        const uint32_t last_scale_row = ceil_div(arguments.shape.n, kScaleBlock) - 1;
        Ring ring;
        Tile tile;
        while (scheduler.next(tile)) {
            const uint32_t scale_row = tile.column / kScaleBlock;
            const float* b_scales =
                arguments.b_scales + tile.group * arguments.b_scales_group_stride + scale_row * arguments.b_scales_row_stride;
            // A tile at the last columns meets one scale only; the second one is then any valid number.
            const int64_t second = scale_row < last_scale_row ? arguments.b_scales_row_stride : 0;
#pragma unroll 1
            for (uint32_t block = 0; block < arguments.k_blocks; ++block, ring.advance()) {
                const uint32_t full = base + kOffsetFull + ring.stage * 8;
                const uint32_t scale_b = base + kOffsetScaleB + ring.stage * (4 * kScalesB);
                barrier_wait(base + kOffsetEmpty + ring.stage * 8, ring.phase ^ 1);
                barrier_arrive_expect(full, kBytesA + kBytesB + kBytesScales + kBytesRowScales);
                load_box(maps.b, full, base + kOffsetB + ring.stage * kBytesB, block * kBlockK, tile.column, tile.group);
                load_box(maps.a, full, base + ring.stage * kBytesA, block * kBlockK, tile.row, tile.a_group);
                load_box(maps.a_scales, full, base + kOffsetScales + ring.stage * kBytesScales, tile.row, block, tile.a_group);
                if constexpr (kRowScales) {
                    load_box(*maps.b_scales, full, base + kOffsetRowScales + ring.stage * kBytesRowScales, tile.column, block,
                             tile.group);
                } else {
                    load_float(scale_b, b_scales + block);
                    if constexpr (kScalesB == 2) load_float(scale_b + 4, b_scales + second + block);
                    arrive_when_loaded(full);
                }
            }
        }
    }

    // What one warp of a consumer needs to know in the main loop.
    struct Consumer {
        const uint8_t* shared;
        uint32_t base;
        uint32_t first_product;  // of the tile's products of 64 rows
        uint32_t scale_row;      // of this thread's upper row in the first of them
        uint32_t scale_change;   // first column of the tile that takes the second B scale
    };

    // Scales of the thread's upper and lower row, for each chunk of columns.
    using RowScales = float[kChunks][2];

    // Issues the product of one k-block and reads its scales. Nothing waits: `sums` is written when the group completes.
    __device__ static void issue(const Consumer& self, const Ring& ring, uint32_t wave, float (&sums)[kBlockN / 2],
                                 RowScales& scales) {
        const float* a_scales =
            reinterpret_cast<const float*>(self.shared + kOffsetScales + ring.stage * kBytesScales) + self.scale_row + wave * 64;
        const float* b_scales = reinterpret_cast<const float*>(self.shared + kOffsetScaleB) + ring.stage * kScalesB;
#pragma unroll
        for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
            float b = 1.0f;  // with row scales: they follow per column
            if constexpr (kScalesB == 1) b = b_scales[0];
            if constexpr (kScalesB == 2) b = b_scales[chunk * kChunk < self.scale_change ? 0 : 1];
            scales[chunk][0] = a_scales[0] * b;
            scales[chunk][1] = a_scales[8] * b;
        }
        const uint64_t a = descriptor(self.base + ring.stage * kBytesA + (self.first_product + wave) * (64 * kBlockK));
        const uint64_t b = descriptor(self.base + kOffsetB + ring.stage * kBytesB);
        hold(sums);
        products_begin();
#pragma unroll
        for (uint32_t k = 0; k < kBlockK / kProductBytes; ++k)
            Product::issue(a + k * kDescriptorStep, b + k * kDescriptorStep, sums, k != 0);
        products_commit();
        hold(sums);
    }

    // Adds a completed sum to the totals.
    __device__ static void promote(float (&totals)[kBlockN / 2], float (&sums)[kBlockN / 2], const RowScales& scales) {
        hold(sums);
#pragma unroll
        for (uint32_t i = 0; i < kBlockN / 2; i += 4) {
            const uint32_t chunk = i * 2 / kChunk;
            totals[i] += scales[chunk][0] * sums[i];
            totals[i + 1] += scales[chunk][0] * sums[i + 1];
            totals[i + 2] += scales[chunk][1] * sums[i + 2];
            totals[i + 3] += scales[chunk][1] * sums[i + 3];
        }
    }

    // The same with a B scale per column, read where the copy engine left it.
    __device__ static void promote(float (&totals)[kBlockN / 2], float (&sums)[kBlockN / 2], const RowScales& scales,
                                   const float2* b_scales) {
        hold(sums);
#pragma unroll
        for (uint32_t i = 0; i < kBlockN / 2; i += 4) {
            const float2 b = b_scales[i];  // columns 2 * i and 2 * i + 1 after this thread's first two
            totals[i] += scales[0][0] * b.x * sums[i];
            totals[i + 1] += scales[0][0] * b.y * sums[i + 1];
            totals[i + 2] += scales[0][1] * b.x * sums[i + 2];
            totals[i + 3] += scales[0][1] * b.y * sums[i + 3];
        }
    }

    __device__ static void wait_full(const Consumer& self, const Ring& ring) {
        barrier_wait(self.base + kOffsetFull + ring.stage * 8, ring.phase);
    }

    __device__ static void release(const Consumer& self, const Ring& ring) {
        if (lane_id() == 0) barrier_arrive(self.base + kOffsetEmpty + ring.stage * 8);
    }

    // Main loop with one sum at a time: the other warpgroup multiplies while this one promotes.
    __device__ static void multiply_in_turn(const Consumer& self, Ring& ring, uint32_t k_blocks,
                                            float (&totals)[kWaves][kBlockN / 2]) {
        float sums[kBlockN / 2];
        RowScales scales;
#pragma unroll 1
        for (uint32_t block = 0; block < k_blocks; ++block, ring.advance()) {
            wait_full(self, ring);
#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave) {
                issue(self, ring, wave, sums, scales);
                products_wait<0>();
                if constexpr (kRowScales) {
                    promote(totals[wave], sums, scales,
                            reinterpret_cast<const float2*>(self.shared + kOffsetRowScales + ring.stage * kBytesRowScales) +
                                lane_id() % 4);
                    __syncwarp();  // all lanes have read the B scales
                    if (wave == kWaves - 1) release(self, ring);
                } else {
                    if (wave == kWaves - 1) release(self, ring);
                    promote(totals[wave], sums, scales);
                }
            }
        }
    }

    // Main loop with two sums: the product of the next k-block is under way while this one is promoted.
    __device__ static void multiply_overlapped(const Consumer& self, Ring& ring, uint32_t k_blocks,
                                               float (&totals)[kBlockN / 2]) {
        float even[kBlockN / 2], odd[kBlockN / 2];
        RowScales even_scales, odd_scales;
        Ring done = ring;
        const auto start = [&](float (&sums)[kBlockN / 2], RowScales& scales) {
            wait_full(self, ring);
            issue(self, ring, 0, sums, scales);
            ring.advance();
        };
        const auto finish = [&](float (&sums)[kBlockN / 2], const RowScales& scales) {
            release(self, done);
            done.advance();
            promote(totals, sums, scales);
        };
        start(even, even_scales);
        uint32_t left = k_blocks - 1;
#pragma unroll 1
        for (; left >= 2; left -= 2) {
            start(odd, odd_scales);
            products_wait<1>();
            finish(even, even_scales);
            start(even, even_scales);
            products_wait<1>();
            finish(odd, odd_scales);
        }
        if (left == 1) {
            start(odd, odd_scales);
            products_wait<1>();
            finish(even, even_scales);
            products_wait<0>();
            finish(odd, odd_scales);
        } else {
            products_wait<0>();
            finish(even, even_scales);
        }
    }

    __device__ static void consume(const GemmArguments& arguments, Scheduler& scheduler, uint8_t* shared, uint32_t base,
                                   uint32_t warpgroup, uint32_t warp) {
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

            const Consumer self{shared, base, warpgroup * kWaves, warp_row + lane_id() / 4,
                                kScaleBlock - tile.column % kScaleBlock};
            if constexpr (kOverlaps) {
                multiply_overlapped(self, ring, arguments.k_blocks, totals[0]);
            } else {
                multiply_in_turn(self, ring, arguments.k_blocks, totals);
            }

#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave) {
                const uint32_t row = tile.row + warp_row + wave * 64;
                if (row >= tile.row_end) continue;
                uint16_t* rows =
                    arguments.d.data + tile.a_group * arguments.d.group_stride + row * arguments.d.row_stride + tile.column;
                store_rows<kBlockN>(totals[wave], strip, rows, arguments.d.row_stride, tile.row_end - row,
                                    arguments.shape.n - tile.column);
            }
        }
    }
};

}  // namespace dj
