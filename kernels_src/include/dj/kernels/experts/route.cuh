// Routing: gives every (token, choice) pair a row of the grouped matrices. Experts start at multiples of the alignment; within an
// expert rows keep the order of the pairs, so that the result is the same on every run. One block does it all.
#pragma once
#include "dj/kernels/experts/rows.cuh"

namespace dj {

struct RouteArguments {
    Pairs pairs;
    int32_t* rows;  // what pairs.rows will be
    int32_t* ends;  // (experts): end row of each expert
    uint32_t experts;
    uint32_t alignment;
};

constexpr uint32_t kMaxExperts = 512;
constexpr uint32_t kRouteThreads = 1024;
constexpr uint32_t kRouteWarps = kRouteThreads / kWarp;

__device__ inline void route(const RouteArguments& arguments) {
    __shared__ uint32_t next_row[kMaxExperts];             // of each expert; first its number of pairs
    __shared__ uint16_t within[kRouteWarps][kMaxExperts];  // pairs of each warp of this round, then rows before them
    __shared__ uint32_t round_row[kMaxExperts];            // next_row at the start of the round
    const uint32_t thread = threadIdx.x, warp = thread / kWarp;
    const auto expert_of = [&](uint32_t pair) {
        const int64_t expert = pair < arguments.pairs.count ? arguments.pairs.expert(pair) : -1;
        // What is no expert of this rank contributes nothing: one number beyond them all stands for it.
        return expert >= 0 && expert < arguments.experts ? static_cast<uint32_t>(expert) : arguments.experts;
    };

    // --- pairs of each expert
    for (uint32_t e = thread; e < kMaxExperts; e += kRouteThreads) next_row[e] = 0;
    __syncthreads();
    for (uint32_t pair = thread; pair < arguments.pairs.count; pair += kRouteThreads) {
        const uint32_t e = expert_of(pair);
        if (e < arguments.experts) atomicAdd(&next_row[e], 1);
    }
    __syncthreads();

    // --- rows where experts start and end
    if (warp == 0) {
        uint32_t before = 0;
        for (uint32_t first = 0; first < arguments.experts; first += kWarp) {
            const uint32_t e = first + thread;
            const uint32_t count = e < arguments.experts ? next_row[e] : 0;
            const uint32_t padded = ceil_div(count, arguments.alignment) * arguments.alignment;
            uint32_t sum = padded;
#pragma unroll
            for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
                const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
                if (thread >= distance) sum += other;
            }
            const uint32_t start = before + sum - padded;
            if (e < arguments.experts) {
                next_row[e] = start;
                arguments.ends[e] = static_cast<int32_t>(start + count);
            }
            before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
        }
    }

    // --- rounds of one pair a thread: rank among the warp's pairs, then among the warps
    for (uint32_t first = 0; first < arguments.pairs.count; first += kRouteThreads) {
        for (uint32_t i = thread; i < kRouteWarps * kMaxExperts; i += kRouteThreads) within[i / kMaxExperts][i % kMaxExperts] = 0;
        __syncthreads();
        const uint32_t pair = first + thread;
        const uint32_t e = expert_of(pair);
        const uint32_t same = __match_any_sync(0xffffffffu, e);
        const uint32_t rank = __popc(same & ((1u << lane_id()) - 1));
        if (rank == 0 && e < arguments.experts) within[warp][e] = static_cast<uint16_t>(__popc(same));
        __syncthreads();
        for (uint32_t expert = thread; expert < arguments.experts; expert += kRouteThreads) {
            uint32_t sum = 0;
            for (uint32_t w = 0; w < kRouteWarps; ++w) {
                const uint32_t pairs = within[w][expert];
                within[w][expert] = static_cast<uint16_t>(sum);
                sum += pairs;
            }
            round_row[expert] = next_row[expert];
            next_row[expert] += sum;
        }
        __syncthreads();
        if (pair < arguments.pairs.count)
            arguments.rows[pair] = e < arguments.experts ? static_cast<int32_t>(round_row[e] + within[warp][e] + rank) : -1;
        __syncthreads();
    }
}

}  // namespace dj
