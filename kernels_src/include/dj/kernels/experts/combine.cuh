// Combine: each token's sum of its experts' rows, weighted, in float32 and in the order of its choices.
#pragma once
#include "dj/kernels/experts/rows.cuh"

namespace dj {

struct CombineArguments {
    const uint16_t* input;  // (rows, columns) bf16
    const void* weights;    // (tokens, top_k) float32 or bf16, rows follow each other
    uint16_t* output;       // (tokens, columns) bf16, rows follow each other
    Pairs pairs;
    int64_t input_stride;
    uint32_t columns;  // a multiple of 8
    uint32_t bf16_weights;
};

// Each thread takes 8 columns of one token.
__device__ inline void combine(const CombineArguments& arguments) {
    const uint32_t token = blockIdx.x;
    const uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (column >= arguments.columns) return;
    float sums[8] = {};
    for (uint32_t choice = 0; choice < arguments.pairs.top_k; ++choice) {
        const uint32_t pair = token * arguments.pairs.top_k + choice;
        const int32_t row = __ldg(arguments.pairs.rows + pair);
        if (row < 0) continue;  // of no expert: not read, so that what it holds never matters
        const float weight =
            arguments.bf16_weights
                ? __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(arguments.weights)[pair]) << 16)
                : static_cast<const float*>(arguments.weights)[pair];
        float values[8];
        unpack_bf16(__ldg(reinterpret_cast<const uint4*>(arguments.input + row * arguments.input_stride + column)), values);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
    }
    *reinterpret_cast<uint4*>(arguments.output + static_cast<int64_t>(token) * arguments.columns + column) = pack_bf16(sums);
}

}  // namespace dj
