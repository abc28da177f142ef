// Routing: gives every (token, choice) pair a row of the grouped matrices. Experts start at multiples of the alignment; within an
// expert rows keep the order of the pairs, so that the result is the same on every run. One block does it, or a cluster of them
// where there are many pairs; each warp takes pairs that follow each other.
#pragma once
#include "dj/kernels/experts/rows.cuh"
#include "dj/ptx/cluster.cuh"
#include "dj/ptx/dependent_launch.cuh"

namespace dj {

struct RouteArguments {
    Pairs pairs;
    int32_t* rows;  // what pairs.rows will be
    int32_t* ends;  // (experts): end row of each expert
    uint32_t experts;
    uint32_t alignment;
};

constexpr uint32_t kMaxExperts = 512;
constexpr uint32_t kRouteWarps = 16;  // at most, of a block
constexpr uint32_t kRouteLoads = 8;   // of a lane under way at once

// Calls `take(pair, expert)` for the pairs of one warp, 32 at a time and by all of its lanes. What is no expert of this rank
// contributes nothing: one number beyond them all stands for it.
template <class Take>
__device__ inline void walk_pairs(const RouteArguments& arguments, uint32_t first, uint32_t end, Take take) {
    for (; first < end; first += kRouteLoads * kWarp) {
        uint32_t experts[kRouteLoads];
#pragma unroll
        for (uint32_t i = 0; i < kRouteLoads; ++i) {
            const uint32_t pair = first + i * kWarp + lane_id();
            const int64_t expert = pair < end ? arguments.pairs.expert(pair) : -1;
            experts[i] = expert >= 0 && expert < arguments.experts ? static_cast<uint32_t>(expert) : arguments.experts;
        }
#pragma unroll
        for (uint32_t i = 0; i < kRouteLoads; ++i)
            if (first + i * kWarp < end) take(first + i * kWarp + lane_id(), experts[i]);
    }
}

__device__ inline void route(const RouteArguments& arguments) {
    __shared__ uint32_t before[kRouteWarps][kMaxExperts];  // pairs of each warp, then of the warps before it in the block
    __shared__ uint32_t totals[kMaxExperts];               // pairs of the block, which other blocks read
    __shared__ uint32_t starts[kMaxExperts];               // pairs of the cluster, then the row where this block's start
    const uint32_t thread = threadIdx.x, warps = blockDim.x / kWarp, warp = warp_uniform(thread / kWarp);
    const uint32_t blocks = cluster_size(), rank = cluster_rank();
    const uint32_t share = ceil_div(arguments.pairs.count, blocks * warps * kWarp) * kWarp;
    const uint32_t first = min_of((rank * warps + warp) * share, arguments.pairs.count);
    const uint32_t end = min_of(first + share, arguments.pairs.count);
    for (uint32_t e = lane_id(); e < arguments.experts; e += kWarp) before[warp][e] = 0;
    __syncwarp();
    wait_for_kernels_before();

    // --- pairs of each expert, by warp
    walk_pairs(arguments, first, end, [&](uint32_t, uint32_t e) {
        const uint32_t same = __match_any_sync(0xffffffffu, e);
        if (lane_id() == __ffs(same) - 1 && e < arguments.experts) before[warp][e] += __popc(same);
        __syncwarp();
    });
    __syncthreads();

    // --- by block
    for (uint32_t e = thread; e < arguments.experts; e += blockDim.x) {
        uint32_t sum = 0;
        for (uint32_t w = 0; w < warps; ++w) {
            const uint32_t pairs = before[w][e];
            before[w][e] = sum;
            sum += pairs;
        }
        totals[e] = starts[e] = sum;
    }

    // --- by cluster: all pairs, and those of the blocks before this one
    if (blocks > 1) {
        cluster_sync_memory();
        for (uint32_t e = thread; e < arguments.experts; e += blockDim.x) {
            uint32_t sum = 0, earlier = 0;
            for (uint32_t r = 0; r < blocks; ++r) {
                const uint32_t pairs = load_in_cluster(address_in(r, shared_address(&totals[e])));
                sum += pairs;
                if (r < rank) earlier += pairs;
            }
            starts[e] = sum;
            for (uint32_t w = 0; w < warps; ++w) before[w][e] += earlier;
        }
        cluster_arrive_after_reads();  // no block leaves while another may still read its counts
    }
    __syncthreads();

    // --- rows where experts start and end
    if (warp == 0) {
        uint32_t rows = 0;
        for (uint32_t some = 0; some < arguments.experts; some += kWarp) {
            const uint32_t e = some + thread;
            const uint32_t count = e < arguments.experts ? starts[e] : 0;
            const uint32_t padded = ceil_div(count, arguments.alignment) * arguments.alignment;
            uint32_t sum = padded;
#pragma unroll
            for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
                const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
                if (thread >= distance) sum += other;
            }
            const uint32_t start = rows + sum - padded;
            if (e < arguments.experts) {
                starts[e] = start;
                if (rank == 0) arguments.ends[e] = static_cast<int32_t>(start + count);
            }
            rows += __shfl_sync(0xffffffffu, sum, kWarp - 1);
        }
    }
    __syncthreads();

    // --- a row for each pair: those of the same expert follow each other, first those of earlier warps
    walk_pairs(arguments, first, end, [&](uint32_t pair, uint32_t e) {
        const uint32_t same = __match_any_sync(0xffffffffu, e);
        const uint32_t earlier = __popc(same & ((1u << lane_id()) - 1));
        const bool routed = e < arguments.experts;
        const uint32_t row = routed ? starts[e] + before[warp][e] + earlier : 0;
        __syncwarp();
        if (earlier == 0 && routed) before[warp][e] += __popc(same);
        __syncwarp();
        if (pair < end) arguments.rows[pair] = routed ? static_cast<int32_t>(row) : -1;
    });
    if (blocks > 1) cluster_wait();
}

}  // namespace dj
