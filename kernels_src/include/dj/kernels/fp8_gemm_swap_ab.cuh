// D = A @ B.T for few rows of A, with the operands of the tensor core swapped: the weights B fill the 64 rows of a product and the
// tokens A its columns, so that a tile of 64 weight rows meets 16 tokens and not 64. Types and scales are those of fp8_gemm_1d2d;
// k-blocks are added in another order, the same on every run, so that the last bits may differ from those of another kernel.
//
// The kernel streams weights: one warp does nothing else, and starts before the block has met. A launch with clusters splits K: each
// block of a cluster sums its part of the k-blocks of one tile, the partial sums cross to the block that stores them, and are added
// in the order of the ranks.
#pragma once
#include "dj/epilogue/store_columns.cuh"
#include "dj/kernels/swapped.cuh"
#include "dj/mma/wgmma.cuh"
#include "dj/ptx/cluster.cuh"
#include "dj/ptx/dependent_launch.cuh"

namespace dj {

template <uint32_t kBlockM, uint32_t kBlockN, uint32_t kStages, class Product>
struct Fp8GemmSwapAb {
    static constexpr uint32_t kBlockK = kScaleBlock;
    static constexpr uint32_t kConsumers = kBlockN / 64;  // warpgroups
    static constexpr uint32_t kConsumerWarps = kConsumers * 4;
    static constexpr uint32_t kThreads = kConsumers * kWarpgroup + 2 * kWarp;
    static constexpr uint32_t kWeightsWarp = kConsumerWarps;
    static constexpr uint32_t kTokensWarp = kConsumerWarps + 1;

    static constexpr uint32_t kBytesA = kBlockM * kBlockK;
    static constexpr uint32_t kBytesB = kBlockN * kBlockK;
    static constexpr uint32_t kBytesScales = kBlockM * 4;
    static constexpr uint32_t kChunks = kBlockM / 8;  // of 8 tokens: 4 values of a lane, 512 bytes of a warp
    static constexpr uint32_t kBytesChunk = kWarp * 16;
    static constexpr uint32_t kBytesPartials = kConsumerWarps * kChunks * kBytesChunk;

    // Shared memory, in this order; spec.kernel_set.dynamic_shared_memory_bytes adds it up for the host.
    static constexpr uint32_t kOffsetB = kStages * kBytesA;
    static constexpr uint32_t kOffsetScales = kOffsetB + kStages * kBytesB;
    static constexpr uint32_t kOffsetPartials = kOffsetScales + kStages * kBytesScales;
    static constexpr uint32_t kOffsetStrips = kOffsetPartials + kBytesPartials;
    static constexpr uint32_t kOffsetFull = kOffsetStrips + kConsumerWarps * kBytesColumns;
    static constexpr uint32_t kOffsetEmpty = kOffsetFull + kStages * 8;
    static constexpr uint32_t kOffsetScaleB = kOffsetEmpty + kStages * 8;
    static constexpr uint32_t kOffsetArrived = kOffsetScaleB + kStages * 8;  // barrier: partial sums of all ranks are here
    static constexpr uint32_t kOffsetTaken = kOffsetArrived + 8;             // barrier: those sent before are read
    static constexpr uint32_t kOffsetGroups = kOffsetTaken + 8;
    static constexpr uint32_t kSharedBytes = kSwizzleRepeat + kOffsetGroups + sizeof(GroupTable);
    static_assert(kBlockM % 16 == 0 && kScaleBlock % kBlockN == 0, "a tile meets one B scale per k-block");

    using Ring = StageRing<kStages>;

    __device__ static void run(const TensorMap& map_a, const TensorMap& map_b, const Fp8GemmArguments& arguments) {
        extern __shared__ uint8_t shared_raw[];
        uint8_t* shared = align_to_swizzle(shared_raw);
        GroupTable& groups = *reinterpret_cast<GroupTable*>(shared + kOffsetGroups);
        const uint32_t base = shared_address(shared);
        const uint32_t warp = warp_uniform(threadIdx.x / kWarp);
        const uint32_t split = cluster_size();

        // --- barriers: the warp that streams the weights makes them and goes on
        if (warp == kWeightsWarp) {
            if (elect_one()) {
                prefetch_map(map_b);
                // Weights, tokens with their scales, and a scale of the weights.
                init_stages<kStages>(base + kOffsetFull, base + kOffsetEmpty, 2 + kTokenArrivals<kBlockM>, kConsumerWarps);
                barrier_init(base + kOffsetArrived, 1);
                barrier_init(base + kOffsetTaken, kConsumerWarps * split);
                fence_barrier_init();
            }
            __syncwarp();
            block_arrive<kThreads>();
        } else {
            if (warp == kTokensWarp && elect_one()) prefetch_map(map_a);
            block_wait<kThreads>();
        }
        if (split > 1) cluster_arrive();  // nobody sends to a block before it has come here
        if (!arguments.waits_for_tokens) wait_for_kernels_before();

        // --- group starts
        if (arguments.shape.counts_rows()) {
            if (warp == kTokensWarp) groups.count(arguments.shape, kBlockM);
            __syncthreads();
        }

        Scheduler scheduler(arguments.shape, groups, blockIdx.x / split, gridDim.x / split);
        const Part part = part_of(arguments.k_blocks, split);
        if (warp == kWeightsWarp) {
            stream_weights(map_b, arguments.reads_b_once != 0, scheduler, part, base);
        } else if (warp == kTokensWarp) {
            if (arguments.waits_for_tokens) wait_for_kernels_before();  // meanwhile weights arrive
            const TokenStages stages{base, base + kOffsetScales, base + kOffsetFull, base + kOffsetEmpty};
            const auto load_b_scale = [&](const Tile& tile, uint32_t k_block, uint32_t stage) {
                const float* b_scales = arguments.b_scales + tile.group * arguments.b_scales_group_stride +
                                        tile.column / kScaleBlock * arguments.b_scales_row_stride;
                load_float(base + kOffsetScaleB + stage * 8, b_scales + k_block);
                arrive_when_loaded(base + kOffsetFull + stage * 8);
            };
            stream_tokens<kBlockM, kBlockN, kStages>(map_a, arguments.a_scales, arguments.shape.m, scheduler, part, stages,
                                                     load_b_scale);
        } else {
            consume(arguments, scheduler, part, split, shared, base, warp);
        }
    }

   private:
    using Scheduler = TileScheduler<kBlockM, kBlockN>;

    __device__ static Part part_of(uint32_t k_blocks, uint32_t split) {
        const uint32_t rank = split > 1 ? cluster_rank() : 0;
        const uint32_t first = k_blocks * rank / split;
        return {warp_uniform(first), warp_uniform(k_blocks * (rank + 1) / split - first)};
    }

    __device__ static void stream_weights(const TensorMap& map_b, bool once, Scheduler& scheduler, const Part& part,
                                          uint32_t base) {
        const bool issues = elect_one();
        const uint64_t policy = evict_first();
        Ring ring;
        Tile tile;
        while (scheduler.next(tile)) {
            if (scheduler.is_idle(tile)) continue;
            Round<kBlockN> round(tile, part);
#pragma unroll 1
            for (uint32_t i = 0; i < part.count; ++i, ring.advance()) {
                const uint32_t full = base + kOffsetFull + ring.stage * 8;
                const uint32_t k = round.next();
                barrier_wait(base + kOffsetEmpty + ring.stage * 8, ring.phase ^ 1);
                if (issues) {
                    barrier_arrive_expect(full, kBytesB);
                    const uint32_t b = base + kOffsetB + ring.stage * kBytesB;
                    if (once)
                        load_box(map_b, full, b, k * kBlockK, tile.column, tile.group, policy);
                    else
                        load_box(map_b, full, b, k * kBlockK, tile.column, tile.group);
                }
                __syncwarp();  // a lane that fell behind by a round would take its parity for an older one
            }
        }
    }

    // What one warp of a consumer needs to know in the main loop.
    struct Consumer {
        const uint8_t* shared;
        uint32_t base;
        uint32_t warpgroup;
        uint32_t warp;  // of all consumers
    };

    using Values = float[kBlockM / 2];
    using Scales = float2[kChunks];  // of this thread's two tokens of each chunk, times the scale of the weights

    __device__ static void wait_full(const Consumer& self, const Ring& ring) {
        barrier_wait(self.base + kOffsetFull + ring.stage * 8, ring.phase);
    }

    // Issues the product of one k-block and reads its scales: while the product runs they arrive, so that nothing of the stage is
    // still being read when it is given back. Nothing waits: `sums` is written when the group completes.
    __device__ static void issue(const Consumer& self, const Ring& ring, Values& sums, Scales& scales) {
        const float2* a_scales =
            reinterpret_cast<const float2*>(self.shared + kOffsetScales + ring.stage * kBytesScales) + lane_id() % 4;
        const float b_scale = *reinterpret_cast<const float*>(self.shared + kOffsetScaleB + ring.stage * 8);
#pragma unroll
        for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
            const float2 a = a_scales[chunk * 4];
            scales[chunk] = {a.x * b_scale, a.y * b_scale};
        }
        const uint64_t weights = descriptor(self.base + kOffsetB + ring.stage * kBytesB + self.warpgroup * (64 * kBlockK));
        const uint64_t tokens = descriptor(self.base + ring.stage * kBytesA);
        hold(sums);
        products_begin();
#pragma unroll
        for (uint32_t k = 0; k < kBlockK / kProductBytes; ++k)
            Product::issue(weights + k * kDescriptorStep, tokens + k * kDescriptorStep, sums, k != 0);
        products_commit();
        hold(sums);
    }

    // Gives the stage of a completed sum back and adds the sum to the totals, each column with the scale of its token.
    __device__ static void promote(uint32_t empty, Values& totals, Values& sums, const Scales& scales) {
        barrier_arrive_if(lane_id() == 0, empty);
        hold(sums);
#pragma unroll
        for (uint32_t i = 0; i < kBlockM / 2; i += 4) {
            const float2 scale = scales[i / 4];
            totals[i] += scale.x * sums[i];
            totals[i + 1] += scale.y * sums[i + 1];
            totals[i + 2] += scale.x * sums[i + 2];
            totals[i + 3] += scale.y * sums[i + 3];
        }
    }

    // Two sums in registers beside the totals: the product of the next k-block is under way while one is promoted.
    __device__ static void multiply(const Consumer& self, Ring& ring, uint32_t k_blocks, Values& totals) {
        Values even, odd;
        Scales even_scales, odd_scales;
        // Returns the barrier of the stage.
        const auto start = [&](Values& sums, Scales& scales) {
            wait_full(self, ring);
            issue(self, ring, sums, scales);
            const uint32_t empty = self.base + kOffsetEmpty + ring.stage * 8;
            ring.advance();
            return empty;
        };
        uint32_t even_empty = start(even, even_scales);
        uint32_t left = k_blocks - 1;
#pragma unroll 1
        for (; left >= 2; left -= 2) {
            const uint32_t odd_empty = start(odd, odd_scales);
            products_wait<1>();
            promote(even_empty, totals, even, even_scales);
            even_empty = start(even, even_scales);
            products_wait<1>();
            promote(odd_empty, totals, odd, odd_scales);
        }
        if (left == 1) {
            const uint32_t odd_empty = start(odd, odd_scales);
            products_wait<1>();
            promote(even_empty, totals, even, even_scales);
            products_wait<0>();
            promote(odd_empty, totals, odd, odd_scales);
        } else {
            products_wait<0>();
            promote(even_empty, totals, even, even_scales);
        }
    }

    // Sends this warp's partial sums to the block that stores its columns: the warps are spread over the ranks in order. The
    // receiver's place for them: [warp among those it stores][rank of the sender][chunk][lane].
    __device__ static void send(const Consumer& self, uint32_t split, const Values& totals) {
        const uint32_t stored = kConsumerWarps / split;  // warps whose columns one block stores
        const uint32_t to = self.warp / stored;
        const uint32_t place = (self.warp % stored * split + cluster_rank()) * kChunks;
        const uint32_t remote = address_in(to, self.base + kOffsetPartials + place * kBytesChunk + lane_id() * 16);
        const uint32_t arrived = address_in(to, self.base + kOffsetArrived);
#pragma unroll
        for (uint32_t chunk = 0; chunk < kChunks; ++chunk)
            store_async(remote + chunk * kBytesChunk, totals[chunk * 4], totals[chunk * 4 + 1], totals[chunk * 4 + 2],
                        totals[chunk * 4 + 3], arrived);
    }

    // Where a tile's output goes.
    struct Target {
        uint16_t* corner;  // row `tile.row`, column `tile.column`
        int64_t row_stride;
        uint32_t rows;
        uint32_t columns;
    };

    __device__ static void store_chunk(const Target& target, uint32_t chunk, uint32_t column, float a, float b, float c, float d,
                                       uint8_t* strip) {
        const uint32_t row = chunk * kRowsAtOnce;
        if (row >= target.rows || column >= target.columns) return;  // the same in the whole warp
        store_columns(a, b, c, d, strip, target.corner + row * target.row_stride + column, target.row_stride, target.rows - row,
                      target.columns - column);
    }

    // Adds the partial sums of all ranks, in their order, and stores them. `split` warps share the chunks of each warp stored.
    __device__ static void receive(const Consumer& self, uint32_t split, uint32_t parity, const Target& target, uint8_t* strip) {
        const uint32_t arrived = self.base + kOffsetArrived;
        if (self.warp == 0 && lane_id() == 0) barrier_arrive_expect(arrived, kBytesPartials);
        barrier_wait_in_cluster(arrived, parity);
        const uint32_t which = self.warp / split;
        const uint32_t column = (cluster_rank() * (kConsumerWarps / split) + which) * kColumnsOfWarp;
        const float4* partials =
            reinterpret_cast<const float4*>(self.shared + kOffsetPartials) + which * split * kChunks * kWarp + lane_id();
#pragma unroll 1
        for (uint32_t chunk = self.warp % split; chunk < kChunks; chunk += split) {
            float4 sum = partials[chunk * kWarp];
#pragma unroll 1
            for (uint32_t rank = 1; rank < split; ++rank) {
                const float4 more = partials[(rank * kChunks + chunk) * kWarp];
                sum.x += more.x;
                sum.y += more.y;
                sum.z += more.z;
                sum.w += more.w;
            }
            store_chunk(target, chunk, column, sum.x, sum.y, sum.z, sum.w, strip);
        }
        __syncwarp();
        // Every sender may overwrite its part now.
        barrier_release_in_cluster_if(lane_id() < split, address_in(lane_id() % split, self.base + kOffsetTaken));
    }

    __device__ static void consume(const Fp8GemmArguments& arguments, Scheduler& scheduler, const Part& part, uint32_t split,
                                   uint8_t* shared, uint32_t base, uint32_t warp) {
        const Consumer self{shared, base, warp / 4, warp};
        uint8_t* strip = shared + kOffsetStrips + warp * kBytesColumns;
        Ring ring;
        Tile tile;
        bool met = split == 1;
        uint32_t parity = 0;
        while (scheduler.next(tile)) {
            if (scheduler.is_idle(tile)) continue;
            Values totals;
#pragma unroll
            for (uint32_t i = 0; i < kBlockM / 2; ++i) totals[i] = 0.0f;
            multiply(self, ring, part.count, totals);

            const Target target{arguments.d.at(tile.a_group, tile.row, tile.column), arguments.d.row_stride,
                                tile.row_end - tile.row, arguments.shape.n - tile.column};
            if (split == 1) {
#pragma unroll
                for (uint32_t chunk = 0; chunk < kChunks; ++chunk)
                    store_chunk(target, chunk, warp * kColumnsOfWarp, totals[chunk * 4], totals[chunk * 4 + 1],
                                totals[chunk * 4 + 2], totals[chunk * 4 + 3], strip);
            } else {
                if (!met) cluster_wait();
                met = true;
                barrier_wait_in_cluster(base + kOffsetTaken, parity ^ 1);
                send(self, split, totals);
                receive(self, split, parity, target, strip);
                parity ^= 1;
            }
        }
        // No block leaves while another may still reach its memory: the last that come are those who have read its partial sums.
        if (!met) cluster_wait();
        if (split > 1) barrier_wait_in_cluster(base + kOffsetTaken, parity ^ 1);
    }
};

}  // namespace dj
