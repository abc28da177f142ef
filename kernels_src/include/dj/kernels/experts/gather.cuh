// Gather: copies each token to the rows of its pairs in the grouped matrix, quantized or as it is. A token is read once, and with
// dynamic scales quantized once; static scales may differ between experts.
#pragma once
#include "dj/kernels/experts/rows.cuh"
#include "dj/ptx/dependent_launch.cuh"

namespace dj {

struct GatherArguments {
    const uint16_t* hidden;      // (tokens, columns) bf16
    void* output;                // (rows, columns) E4M3 or bf16, rows follow each other
    float* scales;               // (rows, ceil(columns / 128)), column stride `scales_stride`; E4M3 only
    const float* static_scales;  // (experts), or null: dynamic
    Pairs pairs;
    int64_t hidden_stride;
    int64_t scales_stride;
    uint32_t columns;  // a multiple of 8, of 16 for E4M3
};

// Each thread takes 8 columns of one token; 16 neighbours share a scale.
template <bool kQuantize>
__device__ inline void gather(const GatherArguments& arguments) {
    const uint32_t token = blockIdx.x;
    const uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const bool inside = column < arguments.columns;
    // The tokens were there before the routing began, which this kernel waits for.
    const uint16_t* source = arguments.hidden + token * arguments.hidden_stride + column;
    float values[8];
    unpack_bf16(inside ? __ldg(reinterpret_cast<const uint4*>(source)) : uint4{0, 0, 0, 0}, values);
    RowPart<kQuantize> part(arguments, values);
    wait_for_kernels_before();

    const uint32_t first = token * arguments.pairs.top_k;
    const int32_t rows = lane_id() < arguments.pairs.top_k ? arguments.pairs.rows[first + lane_id()] : -1;
#pragma unroll 1
    for (uint32_t choice = 0; choice < arguments.pairs.top_k; ++choice) {
        const int32_t row = __shfl_sync(0xffffffffu, rows, choice);
        if (row >= 0 && inside) part.store(arguments, first + choice, row, column);
    }
}

}  // namespace dj
