// Gather: copies each pair's token to the pair's row of the grouped matrix, quantized or as it is. Static scales may differ between
// experts, so a row is quantized per pair and not per token.
#pragma once
#include "dj/kernels/experts/rows.cuh"

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

// Each warp takes 256 columns of one pair.
template <bool kQuantize>
__device__ inline void gather(const GatherArguments& arguments) {
    const uint32_t pair = blockIdx.x * blockDim.y + threadIdx.y;
    const uint32_t column = blockIdx.y * 256 + threadIdx.x * 8;
    if (pair >= arguments.pairs.count) return;  // the whole warp
    const int32_t row = __ldg(arguments.pairs.rows + pair);
    if (row < 0) return;  // the whole warp
    const bool inside = column < arguments.columns;
    const uint16_t* token = arguments.hidden + pair / arguments.pairs.top_k * arguments.hidden_stride;
    const uint4 raw = inside ? __ldg(reinterpret_cast<const uint4*>(token + column)) : uint4{0, 0, 0, 0};
    float values[8];
    unpack_bf16(raw, values);
    store_columns<kQuantize>(arguments, pair, row, column, inside, values);
}

}  // namespace dj
