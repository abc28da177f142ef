// D = A @ B.T for few rows of A, with FP4 weights: the work and the roles are those of fp8_gemm_swap_ab, but a weight is 4 bits in
// memory and becomes E4M3 in the registers from which the tensor core reads it. A is FP8 with a float32 scale per row and 128 columns,
// B is e2m1 with a power of two per row and 32 columns.
//
// B lies in fragments (ops/fp4.py, pack_fragments): 64 rows x 128 columns in the order in which threads want them, so that one copy
// of consecutive bytes brings what a warpgroup multiplies. Each product of 32 columns has sums of its own, which are multiplied by
// the power of two of their row as they are added up; several products are under way meanwhile.
#pragma once
#include "dj/epilogue/store_columns.cuh"
#include "dj/kernels/swapped.cuh"
#include "dj/mma/wgmma.cuh"
#include "dj/ptx/copy.cuh"
#include "dj/ptx/dependent_launch.cuh"

namespace dj {

struct Fp4GemmArguments {
    TokenScales a_scales;
    const uint8_t* fragments;  // (groups, row blocks, k-blocks, kFragmentBytes)
    int64_t group_stride;      // bytes
    int64_t row_block_stride;
    Output d;
    Shape shape;
    uint32_t k_blocks;
    uint32_t reads_b_once;      // or so close together that it need not stay in L2
    uint32_t waits_for_tokens;  // only A is still being written: B and groups were there before the kernel in front began
};

constexpr uint32_t kFragmentRows = 64;
constexpr uint32_t kGroups = 4;                                                   // of 32 columns, in a k-block
constexpr uint32_t kFragmentHalf = kWarpgroup * 16;                               // two groups: 16 bytes of each thread
constexpr uint32_t kFragmentBytes = 2 * kFragmentHalf + kFragmentRows * kGroups;  // and the powers of two

// A nibble becomes E4M3 with its sign in bit 7 and the other bits in bits 4 to 2, which is its value times 2^-6; and powers of two
// are stored with a bias of 128, so that 2^-127 is no subnormal and 0 stands for zero. What both leave to do:
constexpr float kRest = 32.0f;

// Eight weights in a word to two registers of four. Bytes of the first lie in bits 7 and 4 to 2 of those of the word, bytes of the
// second in the bits between: bits 5, 1 and 0 two lower than they belong, bit 6 two higher.
__device__ inline void unpack(uint32_t word, uint32_t& first, uint32_t& second) {
    first = word & 0x9c9c9c9c;
    second = (word << 2 & 0x8c8c8c8c) | (word >> 2 & 0x10101010);
}

// The power of two of one group in a word of four: its biased exponent moves to where a float has it.
__device__ inline float power_of_two(uint32_t group, uint32_t word) {
    const uint32_t moved = group < 3 ? word << (23 - 8 * group) : word >> 1;
    return __uint_as_float(moved & 0x7f800000);
}

template <uint32_t kBlockM, uint32_t kBlockN, uint32_t kStages, class Product>
struct Fp4GemmSwapAb {
    static constexpr uint32_t kBlockK = kScaleBlock;
    static constexpr uint32_t kConsumers = kBlockN / kFragmentRows;  // warpgroups
    static constexpr uint32_t kConsumerWarps = kConsumers * 4;
    static constexpr uint32_t kThreads = kConsumers * kWarpgroup + 2 * kWarp;
    static constexpr uint32_t kWeightsWarp = kConsumerWarps;
    static constexpr uint32_t kTokensWarp = kConsumerWarps + 1;

    static constexpr uint32_t kBytesA = kBlockM * kBlockK;
    static constexpr uint32_t kBytesB = kConsumers * kFragmentBytes;
    static constexpr uint32_t kBytesScales = kBlockM * 4;
    static constexpr uint32_t kChunks = kBlockM / 8;  // of 8 tokens: 4 values of a lane

    // Shared memory, in this order; spec.kernel_set.dynamic_shared_memory_bytes adds it up for the host.
    static constexpr uint32_t kOffsetB = kStages * kBytesA;
    static constexpr uint32_t kOffsetScales = kOffsetB + kStages * kBytesB;
    static constexpr uint32_t kOffsetStrips = kOffsetScales + kStages * kBytesScales;
    static constexpr uint32_t kOffsetFull = kOffsetStrips + kConsumerWarps * kBytesColumns;
    static constexpr uint32_t kOffsetEmpty = kOffsetFull + kStages * 8;
    static constexpr uint32_t kOffsetGroups = kOffsetEmpty + kStages * 8;
    static constexpr uint32_t kSharedBytes = kSwizzleRepeat + kOffsetGroups + sizeof(GroupTable);
    static_assert(kBlockM % 16 == 0 && kBlockN % kFragmentRows == 0, "whole fragments and chunks");

    static constexpr uint32_t kAtOnce = 2;                 // products of 32 columns that begin together
    static constexpr uint32_t kSteps = kGroups / kAtOnce;  // of a k-block

    using Ring = StageRing<kStages>;

    __device__ static void run(const TensorMap& map_a, const Fp4GemmArguments& arguments) {
        extern __shared__ uint8_t shared_raw[];
        uint8_t* shared = align_to_swizzle(shared_raw);
        GroupTable& groups = *reinterpret_cast<GroupTable*>(shared + kOffsetGroups);
        const uint32_t base = shared_address(shared);
        const uint32_t warp = warp_uniform(threadIdx.x / kWarp);

        // --- barriers: the warp that streams the weights makes them and goes on
        if (warp == kWeightsWarp) {
            if (elect_one())  // weights, and tokens with their scales
                init_stages<kStages>(base + kOffsetFull, base + kOffsetEmpty, 1 + kTokenArrivals<kBlockM>, kConsumerWarps);
            __syncwarp();
            block_arrive<kThreads>();
        } else {
            if (warp == kTokensWarp && elect_one()) prefetch_map(map_a);
            block_wait<kThreads>();
        }
        if (!arguments.waits_for_tokens) wait_for_kernels_before();

        // --- group starts
        if (arguments.shape.counts_rows()) {
            if (warp == kTokensWarp) groups.count(arguments.shape, kBlockM);
            __syncthreads();
        }

        Scheduler scheduler(arguments.shape, groups, blockIdx.x, gridDim.x);
        if (warp == kWeightsWarp) {
            stream_weights(arguments, scheduler, base);
        } else if (warp == kTokensWarp) {
            if (arguments.waits_for_tokens) wait_for_kernels_before();  // meanwhile weights arrive
            const TokenStages stages{base, base + kOffsetScales, base + kOffsetFull, base + kOffsetEmpty};
            stream_tokens<kBlockM, kBlockN, kStages>(map_a, arguments.a_scales, arguments.shape.m, scheduler,
                                                     {0, arguments.k_blocks}, stages, [](const Tile&, uint32_t, uint32_t) {});
        } else {
            consume(arguments, scheduler, shared, base, warp);
        }
    }

   private:
    using Scheduler = TileScheduler<kBlockM, kBlockN>;

    __device__ static void stream_weights(const Fp4GemmArguments& arguments, Scheduler& scheduler, uint32_t base) {
        const bool issues = elect_one();
        const uint64_t policy = evict_first();
        Ring ring;
        Tile tile;
        while (scheduler.next(tile)) {
            if (scheduler.is_idle(tile)) continue;
            const uint8_t* fragments = arguments.fragments + tile.group * arguments.group_stride +
                                       tile.column / kFragmentRows * arguments.row_block_stride;
            Round<kBlockN> round(tile, {0, arguments.k_blocks});
#pragma unroll 1
            for (uint32_t i = 0; i < arguments.k_blocks; ++i, ring.advance()) {
                const uint32_t full = base + kOffsetFull + ring.stage * 8;
                const uint8_t* source = fragments + round.next() * kFragmentBytes;
                barrier_wait(base + kOffsetEmpty + ring.stage * 8, ring.phase ^ 1);
                if (issues) {
                    barrier_arrive_expect(full, kBytesB);
#pragma unroll
                    for (uint32_t consumer = 0; consumer < kConsumers; ++consumer) {
                        const uint32_t b = base + kOffsetB + ring.stage * kBytesB + consumer * kFragmentBytes;
                        const uint8_t* rows = source + consumer * arguments.row_block_stride;
                        if (arguments.reads_b_once)
                            load_bytes(full, b, rows, kFragmentBytes, policy);
                        else
                            load_bytes(full, b, rows, kFragmentBytes);
                    }
                }
                __syncwarp();  // a lane that fell behind by a round would take its parity for an older one
            }
        }
    }

    // What one thread of a consumer needs to know in the main loop: where the first stage has what it reads, and barriers and tokens.
    struct Consumer {
        const uint8_t* words;
        const uint8_t* powers;
        const uint8_t* scales;
        uint32_t base;
    };

    using Values = float[kBlockM / 2];
    using Weights = uint32_t[4];
    using Powers = uint2;            // of this thread's two rows, a byte per group
    using Scales = float2[kChunks];  // of this thread's two tokens of each chunk

    // The registers of two steps: while the products of one are under way, the sums of the other are added up and its next weights
    // unpacked.
    struct Registers {
        Values sums[2][kAtOnce];
        Weights weights[2][kAtOnce];
    };

    // Begins the products of one step.
    __device__ static void begin(uint32_t step, Registers& registers, const uint4 (&words)[2], uint64_t tokens) {
        Values(&sums)[kAtOnce] = registers.sums[step % 2];
        Weights(&weights)[kAtOnce] = registers.weights[step % 2];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t group = step * kAtOnce + i;
            const uint4& pair = words[group / 2];
            unpack(group % 2 == 0 ? pair.x : pair.z, weights[i][0], weights[i][1]);
            unpack(group % 2 == 0 ? pair.y : pair.w, weights[i][2], weights[i][3]);
            hold(weights[i]);
            hold(sums[i]);
        }
        products_begin();
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
            Product::issue(weights[i], tokens + (step * kAtOnce + i) * kDescriptorStep, sums[i]);
        products_commit();
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) hold(sums[i]);
    }

    // Adds the sums of a step whose products are complete, each row with its power of two.
    __device__ static void add(uint32_t step, Registers& registers, const Powers& powers, Values& block) {
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t group = step * kAtOnce + i;
            Values& sums = registers.sums[step % 2][i];
            hold(sums);
            hold(registers.weights[step % 2][i]);
            const float upper = power_of_two(group, powers.x);
            const float lower = power_of_two(group, powers.y);
#pragma unroll
            for (uint32_t j = 0; j < kBlockM / 2; ++j) {
                const float power = j % 4 < 2 ? upper : lower;
                block[j] = group == 0 ? sums[j] * power : block[j] + sums[j] * power;
            }
        }
        hold(block);  // now, and not when the registers belong to the next products
    }

    // Adds the sum of a k-block to the totals, each column with the scale of its token.
    __device__ static void promote(const Scales& scales, const Values& block, Values& totals) {
#pragma unroll
        for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
            const float2 scale = scales[chunk];
            const uint32_t i = chunk * 4;
            totals[i] += scale.x * block[i];
            totals[i + 1] += scale.y * block[i + 1];
            totals[i + 2] += scale.x * block[i + 2];
            totals[i + 3] += scale.y * block[i + 3];
        }
    }

    // No product is under way from one k-block to the next: the compiler would wait for each. Other warpgroups of the SM use the time.
    __device__ static void multiply(const Consumer& self, Ring& ring, uint32_t k_blocks, Values& totals) {
        Registers registers;
        Values block;
#pragma unroll 1
        for (uint32_t i = 0; i < k_blocks; ++i, ring.advance()) {
            barrier_wait(self.base + kOffsetFull + ring.stage * 8, ring.phase);
            const uint4* halves = reinterpret_cast<const uint4*>(self.words + ring.stage * kBytesB);
            const uint4 words[2] = {halves[0], halves[kWarpgroup]};
            const Powers powers = *reinterpret_cast<const Powers*>(self.powers + ring.stage * kBytesB);
            const float2* a_scales = reinterpret_cast<const float2*>(self.scales + ring.stage * kBytesScales);
            const uint64_t tokens = descriptor(self.base + ring.stage * kBytesA);
            Scales scales;
#pragma unroll
            for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
                const float2 a = a_scales[chunk * 4];
                scales[chunk] = {a.x * kRest, a.y * kRest};
            }
            begin(0, registers, words, tokens);
#pragma unroll
            for (uint32_t step = 1; step < kSteps; ++step) {
                begin(step, registers, words, tokens);
                products_wait<1>();
                add(step - 1, registers, powers, block);
            }
            products_wait<0>();
            add(kSteps - 1, registers, powers, block);
            promote(scales, block, totals);
            barrier_arrive_if(lane_id() == 0, self.base + kOffsetEmpty + ring.stage * 8);
        }
    }

    __device__ static void consume(const Fp4GemmArguments& arguments, Scheduler& scheduler, uint8_t* shared, uint32_t base,
                                   uint32_t warp) {
        const uint32_t thread = threadIdx.x % kWarpgroup;
        const uint8_t* fragment = shared + kOffsetB + warp / 4 * kFragmentBytes;
        const Consumer self{fragment + thread * 16, fragment + 2 * kFragmentHalf + thread / 4 * 8,
                            shared + kOffsetScales + thread % 4 * 8, base};
        uint8_t* strip = shared + kOffsetStrips + warp * kBytesColumns;
        const uint32_t first_column = warp * kColumnsOfWarp;
        Ring ring;
        Tile tile;
        while (scheduler.next(tile)) {
            if (scheduler.is_idle(tile)) continue;
            Values totals;
#pragma unroll
            for (uint32_t i = 0; i < kBlockM / 2; ++i) totals[i] = 0.0f;
            multiply(self, ring, arguments.k_blocks, totals);

            const uint32_t column = tile.column + first_column;
            if (column >= arguments.shape.n) continue;  // the same in the whole warp
            uint16_t* corner = arguments.d.at(tile.a_group, tile.row, column);
#pragma unroll
            for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
                const uint32_t row = chunk * kRowsAtOnce;
                const uint32_t i = chunk * 4;
                if (row < tile.row_end - tile.row)
                    store_columns(totals[i], totals[i + 1], totals[i + 2], totals[i + 3], strip,
                                  corner + row * arguments.d.row_stride, arguments.d.row_stride, tile.row_end - tile.row - row,
                                  arguments.shape.n - column);
            }
        }
    }
};

}  // namespace dj
