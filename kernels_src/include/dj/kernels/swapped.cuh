// What the GEMMs share whose operands are swapped in the tensor core: the walk over k-blocks and the warp that streams tokens.
#pragma once
#include "dj/kernels/fp8_arguments.cuh"
#include "dj/kernels/roles.cuh"

namespace dj {

// The k-blocks that a block sums.
struct Part {
    uint32_t first;
    uint32_t count;
};

// Goes once round the k-blocks of a tile's part. Tiles start at different ones, each always at the same: all blocks would otherwise
// ask for the same few lines of A at once.
template <uint32_t kBlockN>
class Round {
   public:
    __device__ Round(const Tile& tile, const Part& part) : part_(part), at_(tile.column / kBlockN % part.count) {}

    __device__ uint32_t next() {
        const uint32_t k_block = part_.first + at_;
        if (++at_ == part_.count) at_ = 0;
        return k_block;
    }

   private:
    const Part part_;
    uint32_t at_;
};

template <uint32_t kBlockM>
constexpr uint32_t kTokenArrivals = 1 + kBlockM;

// Addresses in shared memory of the first stage: tokens, their scales, and the barriers.
struct TokenStages {
    uint32_t tokens;
    uint32_t scales;
    uint32_t full;
    uint32_t empty;
};

// Brings A and its scales, stage by stage: the stage's barrier expects kTokenArrivals<kBlockM>. One thread calls
// `beside(tile, k_block, stage)` for what else a stage needs.
//
// Scales come through L1, a lane for each token. All blocks want the same few: those of eight k-blocks of up to four tokens lie in a
// line of L2, which would have to be asked for each k-block of each tile.
template <uint32_t kBlockM, uint32_t kBlockN, uint32_t kStages, class Scheduler, class Beside>
__device__ inline void stream_tokens(const TensorMap& map_a, const TokenScales& scales, uint32_t rows, Scheduler& scheduler,
                                     const Part& part, const TokenStages& stages, const Beside& beside) {
    static_assert(kBlockM <= kWarp);
    constexpr uint32_t kBytes = kBlockM * kScaleBlock;
    const bool issues = elect_one();
    StageRing<kStages> ring;
    Tile tile;
    while (scheduler.next(tile)) {
        if (scheduler.is_idle(tile)) continue;
        Round<kBlockN> round(tile, part);
        const bool exists = tile.row + lane_id() < rows;
        const float* scale = scales.data + tile.a_group * scales.group_stride + tile.row + (exists ? lane_id() : 0);
#pragma unroll 1
        for (uint32_t i = 0; i < part.count; ++i, ring.advance()) {
            const uint32_t k_block = round.next();
            const uint32_t full = stages.full + ring.stage * 8;
            barrier_wait(stages.empty + ring.stage * 8, ring.phase ^ 1);
            if (issues) {
                barrier_arrive_expect(full, kBytes);
                load_box(map_a, full, stages.tokens + ring.stage * kBytes, k_block * kScaleBlock, tile.row, tile.a_group);
                beside(tile, k_block, ring.stage);
            }
            if (lane_id() < kBlockM) {
                load_float_or_zero(stages.scales + (ring.stage * kBlockM + lane_id()) * 4, scale + k_block * scales.column_stride,
                                   exists);
                arrive_when_loaded(full);
            }
            __syncwarp();  // a lane that fell behind by a round would take its parity for an older one
        }
    }
}

}  // namespace dj
