// How the kernels of the experts forward find their rows: pair p is (token p / top_k, choice p % top_k).
#pragma once
#include "dj/kernels/quantize.cuh"

namespace dj {

struct Pairs {
    const void* experts;  // (tokens, top_k) int32 or int64, rows follow each other
    const int32_t* rows;  // (tokens, top_k): row of each pair in the grouped matrices, negative for a pair of no expert
    uint32_t count;       // tokens * top_k
    uint32_t top_k;
    uint32_t wide_experts;  // `experts` is int64

    __device__ int64_t expert(uint32_t pair) const {
        return wide_experts ? static_cast<const int64_t*>(experts)[pair] : static_cast<const int32_t*>(experts)[pair];
    }
};

// Stores 8 columns of a pair's row, quantized with the scale of their 128 columns or as bf16. All lanes of the warp take part, also
// those that are not `inside` the row. A static scale belongs to the expert.
template <bool kQuantize, class Arguments>
__device__ inline void store_columns(const Arguments& arguments, uint32_t pair, int32_t row, uint32_t column, bool inside,
                                     const float (&values)[8]) {
    const int64_t at = static_cast<int64_t>(row) * arguments.columns + column;
    if constexpr (kQuantize) {
        const float largest = largest_of<16>(values);
        if (!inside) return;
        const float scale =
            arguments.static_scales ? __ldg(arguments.static_scales + arguments.pairs.expert(pair)) : scale_of(largest, false);
        store_quantized(static_cast<uint32_t*>(arguments.output) + at / 4, values, scale);
        if (threadIdx.x % 16 == 0) arguments.scales[column / 128 * arguments.scales_stride + row] = scale;
    } else if (inside) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(arguments.output) + at) = pack_bf16(values);
    }
}

}  // namespace dj
