// Gather: copies each pair's token to the pair's row of the grouped matrix, quantized or as it is. A static scale belongs to the
// expert, so a row is quantized per pair and not per token.
#pragma once
#include "dj/kernels/experts/rows.cuh"
#include "dj/kernels/quantize.cuh"

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
    const int64_t at = static_cast<int64_t>(row) * arguments.columns + column;
    if constexpr (kQuantize) {
        float values[8];
        unpack_bf16(raw, values);
        const float largest = largest_of<16>(values);
        if (!inside) return;
        const float scale =
            arguments.static_scales ? __ldg(arguments.static_scales + arguments.pairs.expert(pair)) : scale_of(largest, false);
        store_quantized(static_cast<uint32_t*>(arguments.output) + at / 4, values, scale);
        if (threadIdx.x % 16 == 0) arguments.scales[column / 128 * arguments.scales_stride + row] = scale;
    } else if (inside) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(arguments.output) + at) = raw;
    }
}

}  // namespace dj
