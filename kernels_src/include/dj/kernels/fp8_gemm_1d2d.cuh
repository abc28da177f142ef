// D = A @ B.T on Hopper: A and B in E4M3, K-major; one float32 scale per row and 128 columns of A, one per 128 x 128 block of B
// (or, with row scales, one per row and 128 columns of B).
//
// Warp-specialised and persistent. One warp of the last warpgroup keeps the copy engine busy over a ring of stages; the other
// warpgroups multiply. The tensor core sums FP8 products with fewer bits than float32, so the sum of each k-block (128 columns)
// is scaled and added to float32 totals on the CUDA cores, while the tensor core works on the next k-block (of this warpgroup
// where registers allow two sums, of the other warpgroup in any case).
//
// In a cluster of two, the blocks take neighbouring tiles of the same rows: each loads half of the A tile and multicasts it to both,
// which saves L2 reads.
#pragma once
#include "dj/kernels/fp8_arguments.cuh"
#include "dj/kernels/roles.cuh"
#include "dj/mma/wgmma.cuh"
#include "dj/ptx/cluster.cuh"
#include "dj/ptx/dependent_launch.cuh"
#include "dj/ptx/registers.cuh"

namespace dj {

template <uint32_t kBlockM, uint32_t kBlockN, uint32_t kStages, uint32_t kCluster, bool kRowScales, class Product>
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
    static_assert(kCluster == 1 || (kCluster == 2 && kBlockM >= 128), "a warpgroup of products, or one half of them each");
    static_assert(kBlockN % 16 == 0 && (kScalesB < 2 || kBlockN == 192), "chunks of 64 columns start at multiples of 64");

    using Ring = StageRing<kStages>;

    struct Maps {
        const TensorMap& a;
        const TensorMap& b;
        const TensorMap& a_scales;
        const TensorMap* b_scales;  // row scales only
    };

    __device__ static void run(const Maps& maps, const Fp8GemmArguments& arguments) {
        extern __shared__ uint8_t shared_raw[];
        uint8_t* shared = align_to_swizzle(shared_raw);
        GroupTable& groups = *reinterpret_cast<GroupTable*>(shared + kOffsetGroups);
        const uint32_t base = shared_address(shared);
        const uint32_t warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
        const uint32_t warp = warp_uniform(threadIdx.x / kWarp);

        // --- barriers and group starts
        // A stage is full with the copy engine's bytes and, unless it brings them too, the B scales.
        if (threadIdx.x == 0)
            init_stages<kStages>(base + kOffsetFull, base + kOffsetEmpty, kRowScales ? 1 : 2, kCluster * kConsumerWarps);
        if (warp == kConsumerWarps && elect_one()) {
            prefetch_map(maps.a);
            prefetch_map(maps.b);
            prefetch_map(maps.a_scales);
            if constexpr (kRowScales) prefetch_map(*maps.b_scales);
        }
        wait_for_kernels_before();
        if (warp == 1 && arguments.shape.counts_rows()) groups.count(arguments.shape, kBlockM);
        __syncthreads();
        if constexpr (kCluster > 1) cluster_sync();  // no copy for a block whose barriers are not ready

        Scheduler scheduler(arguments.shape, groups, blockIdx.x / kCluster, gridDim.x / kCluster);
        if (warpgroup == kConsumers) {
            if constexpr (kConsumers == 2) lower_registers_to<kProducerRegisters>();
            if (warp == kConsumerWarps) produce(maps, arguments, scheduler, base);
        } else {
            if constexpr (kConsumers == 2) raise_registers_to<kConsumerRegisters>();
            consume(arguments, scheduler, shared, base, warpgroup, warp);
        }
    }

   private:
    // A tile of the scheduler holds those of all blocks of a cluster, side by side; the last of them may lie outside D.
    using Scheduler = TileScheduler<kBlockM, kBlockN * kCluster>;

    __device__ static bool next_tile(Scheduler& scheduler, Tile& tile) {
        if (!scheduler.next(tile)) return false;
        if constexpr (kCluster > 1) tile.column += cluster_rank() * kBlockN;
        return true;
    }

    __device__ static void produce(const Maps& maps, const Fp8GemmArguments& arguments, Scheduler& scheduler, uint32_t base) {
        const uint32_t last_scale_row = ceil_div(arguments.shape.n, kScaleBlock) - 1;
        const bool issues = elect_one();
        const uint64_t policy = evict_first();
        const uint32_t share =
            kCluster > 1 ? cluster_rank() * (kBlockM / kCluster) : 0;  // of the rows of A, that this block loads
        Ring ring;
        Tile tile;
        while (next_tile(scheduler, tile)) {
            if (scheduler.is_idle(tile)) continue;
            const uint32_t scale_row = min_of(tile.column / kScaleBlock, last_scale_row);
            const float* b_scales =
                arguments.b_scales + tile.group * arguments.b_scales_group_stride + scale_row * arguments.b_scales_row_stride;
            // A tile at the last columns meets one scale only; the second one is then any valid number.
            const int64_t second = scale_row < last_scale_row ? arguments.b_scales_row_stride : 0;
#pragma unroll 1
            for (uint32_t block = 0; block < arguments.k_blocks; ++block, ring.advance()) {
                const uint32_t full = base + kOffsetFull + ring.stage * 8;
                const uint32_t scale_b = base + kOffsetScaleB + ring.stage * (4 * kScalesB);
                barrier_wait(base + kOffsetEmpty + ring.stage * 8, ring.phase ^ 1);
                if (issues) {
                    barrier_arrive_expect(full, kBytesA + kBytesB + kBytesScales + kBytesRowScales);
                    const uint32_t b = base + kOffsetB + ring.stage * kBytesB;
                    if (arguments.reads_b_once)
                        load_box(maps.b, full, b, block * kBlockK, tile.column, tile.group, policy);
                    else
                        load_box(maps.b, full, b, block * kBlockK, tile.column, tile.group);
                    if constexpr (kCluster == 1) {
                        load_box(maps.a, full, base + ring.stage * kBytesA, block * kBlockK, tile.row, tile.a_group);
                    } else {
                        load_box_multicast(maps.a, full, base + ring.stage * kBytesA + share * kBlockK, block * kBlockK,
                                           tile.row + share, tile.a_group, (1 << kCluster) - 1);
                    }
                    load_box(maps.a_scales, full, base + kOffsetScales + ring.stage * kBytesScales, tile.row, block,
                             tile.a_group);
                    if constexpr (kRowScales) {
                        load_box(*maps.b_scales, full, base + kOffsetRowScales + ring.stage * kBytesRowScales, tile.column, block,
                                 tile.group);
                    } else {
                        load_float(scale_b, b_scales + block);
                        if constexpr (kScalesB == 2) load_float(scale_b + 4, b_scales + second + block);
                        arrive_when_loaded(full);
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

    // Where a stage's operands are: the halves of their descriptors that differ.
    struct Operands {
        uint32_t a, b;
    };

    // What one warp of a consumer needs to know in the main loop.
    struct Consumer {
        const uint8_t* shared;
        uint32_t base;
        Operands operands;      // of the first stage, for this warpgroup's first product
        uint32_t scale_row;     // of this thread's upper row in the first of them
        uint32_t scale_change;  // first column of the tile that takes the second B scale
        uint32_t empty;         // barriers of the first stage, of the block of the cluster that this lane tells
    };

    // Of the thread's upper and lower row, for each chunk of columns.
    struct RowScales {
        float upper[kChunks];
        float lower[kChunks];
    };

    // Reads the scales of a stage. B has the first of its scales in the first chunk and the second in the last.
    __device__ static void read_scales(const Consumer& self, const Ring& ring, uint32_t wave, RowScales& scales) {
        const float* a_scales =
            reinterpret_cast<const float*>(self.shared + kOffsetScales + ring.stage * kBytesScales) + self.scale_row + wave * 64;
        const float* b_scales = reinterpret_cast<const float*>(self.shared + kOffsetScaleB) + ring.stage * kScalesB;
        const float upper = a_scales[0];
        const float lower = a_scales[8];
#pragma unroll
        for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
            float b = 1.0f;  // with row scales: they follow per column
            if constexpr (kScalesB == 1) b = b_scales[0];
            if constexpr (kScalesB == 2) {
                const bool is_first = chunk == 0 || (chunk < kChunks - 1 && chunk * kChunk < self.scale_change);
                b = b_scales[is_first ? 0 : 1];
            }
            scales.upper[chunk] = upper * b;
            scales.lower[chunk] = lower * b;
        }
    }

    __device__ static Operands operands_of(const Consumer& self, uint32_t stage) {
        return {self.operands.a + stage * (kBytesA / 16), self.operands.b + stage * (kBytesB / 16)};
    }

    // Issues the product of one k-block. Nothing waits: `sums` is written when the group completes.
    __device__ static void issue(const Operands& operands, uint32_t wave, float (&sums)[kBlockN / 2]) {
        const uint64_t a = whole_descriptor(operands.a + wave * (64 * kBlockK / 16));
        const uint64_t b = whole_descriptor(operands.b);
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
            totals[i] += scales.upper[chunk] * sums[i];
            totals[i + 1] += scales.upper[chunk] * sums[i + 1];
            totals[i + 2] += scales.lower[chunk] * sums[i + 2];
            totals[i + 3] += scales.lower[chunk] * sums[i + 3];
        }
    }

    // The same with a B scale per column, read where the copy engine left it.
    __device__ static void promote(float (&totals)[kBlockN / 2], float (&sums)[kBlockN / 2], const RowScales& scales,
                                   const float2* b_scales) {
        hold(sums);
#pragma unroll
        for (uint32_t i = 0; i < kBlockN / 2; i += 4) {
            const float2 b = b_scales[i];  // columns 2 * i and 2 * i + 1 after this thread's first two
            totals[i] += scales.upper[0] * b.x * sums[i];
            totals[i + 1] += scales.upper[0] * b.y * sums[i + 1];
            totals[i + 2] += scales.lower[0] * b.x * sums[i + 2];
            totals[i + 3] += scales.lower[0] * b.y * sums[i + 3];
        }
    }

    __device__ static void wait_full(const Consumer& self, const Ring& ring) {
        barrier_wait(self.base + kOffsetFull + ring.stage * 8, ring.phase);
    }

    // Gives a stage back: `empty` is its barrier, of the block of the cluster that this lane tells.
    __device__ static void release(uint32_t empty) {
        if constexpr (kCluster == 1) {
            barrier_arrive_if(lane_id() == 0, empty);
        } else {
            barrier_arrive_in_cluster_if(lane_id() < kCluster, empty);
        }
    }

    // Main loop with one sum at a time: the other warpgroup multiplies while this one promotes. What the next product needs is looked
    // up while this one runs, so that little stands between a promotion and the next product.
    __device__ static void multiply_in_turn(const Consumer& self, Ring& ring, uint32_t k_blocks,
                                            float (&totals)[kWaves][kBlockN / 2]) {
        float sums[kBlockN / 2];
        RowScales scales[kWaves];
        const auto read_all = [&](const Ring& of) {
#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave) read_scales(self, of, wave, scales[wave]);
        };
        wait_full(self, ring);
        read_all(ring);
        Operands operands = operands_of(self, ring.stage);
#pragma unroll 1
        for (uint32_t left = k_blocks; left > 0; --left) {
            Ring next = ring;
            next.advance();
            // Summed up and not multiplied out: the compiler would do that before the next product, and not in its shadow.
            const Operands next_operands =
                next.stage == 0 ? self.operands : Operands{operands.a + kBytesA / 16, operands.b + kBytesB / 16};
#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave) {
                issue(operands, wave, sums);
                const RowScales current = scales[wave];
                if (wave == kWaves - 1 && left > 1) {
                    wait_full(self, next);
                    read_all(next);
                }
                products_wait<0>();
                if constexpr (kRowScales) {
                    promote(totals[wave], sums, current,
                            reinterpret_cast<const float2*>(self.shared + kOffsetRowScales + ring.stage * kBytesRowScales) +
                                lane_id() % 4);
                    fence_reads_before_copies();  // all lanes have read the B scales
                    if (wave == kWaves - 1) release(self.empty + ring.stage * 8);
                } else {
                    if (wave == kWaves - 1) release(self.empty + ring.stage * 8);
                    promote(totals[wave], sums, current);
                }
            }
            ring = next;
            operands = next_operands;
        }
    }

    // Main loop with two sums: the product of the next k-block is under way while this one is promoted.
    __device__ static void multiply_overlapped(const Consumer& self, Ring& ring, uint32_t k_blocks,
                                               float (&totals)[kBlockN / 2]) {
        float even[kBlockN / 2], odd[kBlockN / 2];
        RowScales even_scales, odd_scales;
        uint32_t even_done, odd_done;  // barriers of the stages whose products are under way
        const auto start = [&](float (&sums)[kBlockN / 2], RowScales& scales, uint32_t& done) {
            wait_full(self, ring);
            read_scales(self, ring, 0, scales);
            issue(operands_of(self, ring.stage), 0, sums);
            done = self.empty + ring.stage * 8;
            ring.advance();
        };
        const auto finish = [&](float (&sums)[kBlockN / 2], const RowScales& scales, uint32_t done) {
            release(done);
            promote(totals, sums, scales);
        };
        start(even, even_scales, even_done);
        uint32_t left = k_blocks - 1;
#pragma unroll 1
        for (; left >= 2; left -= 2) {
            start(odd, odd_scales, odd_done);
            products_wait<1>();
            finish(even, even_scales, even_done);
            start(even, even_scales, even_done);
            products_wait<1>();
            finish(odd, odd_scales, odd_done);
        }
        if (left == 1) {
            start(odd, odd_scales, odd_done);
            products_wait<1>();
            finish(even, even_scales, even_done);
            products_wait<0>();
            finish(odd, odd_scales, odd_done);
        } else {
            products_wait<0>();
            finish(even, even_scales, even_done);
        }
    }

    __device__ static void consume(const Fp8GemmArguments& arguments, Scheduler& scheduler, uint8_t* shared, uint32_t base,
                                   uint32_t warpgroup, uint32_t warp) {
        const uint32_t warp_row = warpgroup * (64 * kWaves) + warp % 4 * 16;  // of the tile, first wave
        uint8_t* strip = shared + kOffsetStrips + warp * kBytesStrip;
        uint32_t empty = base + kOffsetEmpty;
        if constexpr (kCluster > 1) empty = address_in(lane_id() % kCluster, empty);
        Ring ring;
        Tile tile;
        while (next_tile(scheduler, tile)) {
            if (scheduler.is_idle(tile)) continue;
            float totals[kWaves][kBlockN / 2];
#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave)
#pragma unroll
                for (uint32_t i = 0; i < kBlockN / 2; ++i) totals[wave][i] = 0.0f;

            const Consumer self{shared,
                                base,
                                {descriptor_half(base + warpgroup * kWaves * (64 * kBlockK)), descriptor_half(base + kOffsetB)},
                                warp_row + lane_id() / 4,
                                kScaleBlock - tile.column % kScaleBlock,
                                empty};
            if constexpr (kOverlaps) {
                multiply_overlapped(self, ring, arguments.k_blocks, totals[0]);
            } else {
                multiply_in_turn(self, ring, arguments.k_blocks, totals);
            }

#pragma unroll
            for (uint32_t wave = 0; wave < kWaves; ++wave) {
                const uint32_t row = tile.row + warp_row + wave * 64;
                if (row >= tile.row_end || (kCluster > 1 && tile.column >= arguments.shape.n)) continue;
                uint16_t* rows = arguments.d.at(tile.a_group, row, tile.column);
                uint32_t pairs[kBlockN / 4];
                to_bf16_pairs(totals[wave], pairs);
                store_rows<kBlockN>(pairs, strip, rows, arguments.d.row_stride, tile.row_end - row,
                                    arguments.shape.n - tile.column);
            }
        }
    }
};

}  // namespace dj
