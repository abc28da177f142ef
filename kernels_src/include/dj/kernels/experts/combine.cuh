// Combine: each token's sum of its experts' rows, weighted, in float32 and in the order of its choices.
#pragma once
#include "dj/kernels/experts/rows.cuh"
#include "dj/ptx/dependent_launch.cuh"

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

__device__ inline float weight_of(const CombineArguments& arguments, uint32_t pair) {
    if (!arguments.bf16_weights) return static_cast<const float*>(arguments.weights)[pair];
    return low_bf16(static_cast<const uint16_t*>(arguments.weights)[pair]);
}

// Each thread takes 8 columns of one token.
__device__ inline void combine(const CombineArguments& arguments) {
    const uint32_t column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    // Rows and weights of the choices, one a lane: both were there before the GEMM began, which this kernel waits for.
    int32_t rows = -1;
    float weights = 0.0f;
    if (lane_id() < arguments.pairs.top_k) {
        const uint32_t pair = blockIdx.x * arguments.pairs.top_k + lane_id();
        rows = arguments.pairs.rows[pair];
        weights = weight_of(arguments, pair);
    }
    wait_for_kernels_before();
    float sums[8] = {};
#pragma unroll 4
    for (uint32_t choice = 0; choice < arguments.pairs.top_k; ++choice) {
        const int32_t row = __shfl_sync(0xffffffffu, rows, choice);
        const float weight = __shfl_sync(0xffffffffu, weights, choice);
        // Of no expert: not read, so that what it holds never matters.
        if (row < 0 || column >= arguments.columns) continue;
        float values[8];
        unpack_bf16(*reinterpret_cast<const uint4*>(arguments.input + row * arguments.input_stride + column), values);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
    }
    if (column >= arguments.columns) return;
    *reinterpret_cast<uint4*>(arguments.output + static_cast<int64_t>(blockIdx.x) * arguments.columns + column) = pack_bf16(sums);
}

}  // namespace dj
