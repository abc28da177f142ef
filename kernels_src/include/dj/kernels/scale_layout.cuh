// Row-major A scales (groups, m, k_blocks) to M-major ones, whose rows of `column_stride` floats the copy engine can read.
#pragma once
#include "dj/types.cuh"

namespace dj {

struct ScaleLayoutArguments {
    const float* input;
    float* output;
    int64_t input_group_stride;
    int64_t input_row_stride;
    int64_t output_group_stride;
    int64_t output_column_stride;
    uint32_t m;
    uint32_t k_blocks;
};

// One block turns kRows x kColumns scales through shared memory, so that both sides are read and written in whole lines.
template <uint32_t kRows, uint32_t kColumns>
__device__ inline void scale_layout(const ScaleLayoutArguments& arguments) {
    __shared__ float turned[kColumns][kRows + 1];
    const uint32_t first_row = blockIdx.x * kRows;
    const uint32_t first_column = blockIdx.y * kColumns;
    const float* input = arguments.input + blockIdx.z * arguments.input_group_stride;
    float* output = arguments.output + blockIdx.z * arguments.output_group_stride;

    for (uint32_t i = threadIdx.x; i < kRows * kColumns; i += blockDim.x) {
        const uint32_t row = i / kColumns, column = i % kColumns;
        if (first_row + row < arguments.m && first_column + column < arguments.k_blocks)
            turned[column][row] = __ldg(input + (first_row + row) * arguments.input_row_stride + first_column + column);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kRows * kColumns; i += blockDim.x) {
        const uint32_t column = i / kRows, row = i % kRows;
        if (first_row + row < arguments.m && first_column + column < arguments.k_blocks)
            output[(first_column + column) * arguments.output_column_stride + first_row + row] = turned[column][row];
    }
}

}  // namespace dj
