// Transposes matrices of bytes: (groups, rows, columns) to (groups, columns, rows), for FP8 operands that lie N-major.
#pragma once
#include "dj/types.cuh"

namespace dj {

struct TransposeArguments {
    const uint8_t* input;
    uint8_t* output;  // rows follow each other
    int64_t input_group_stride;
    int64_t input_row_stride;  // a multiple of 8
    uint32_t rows;             // a multiple of 8
    uint32_t columns;          // a multiple of 8
};

// Each block of 256 threads turns 64 x 64 bytes through shared memory: 8 bytes a thread and step, on both sides.
__device__ inline void transpose(const TransposeArguments& arguments) {
    __shared__ uint8_t tile[64][64 + 8];
    const uint32_t row = blockIdx.x * 64, column = blockIdx.y * 64;
    const uint8_t* input = arguments.input + blockIdx.z * arguments.input_group_stride;
    uint8_t* output = arguments.output + static_cast<int64_t>(blockIdx.z) * arguments.rows * arguments.columns;

    for (uint32_t i = threadIdx.x; i < 64 * 8; i += blockDim.x) {
        const uint32_t r = i / 8, c = i % 8 * 8;
        if (row + r < arguments.rows && column + c < arguments.columns)
            *reinterpret_cast<uint2*>(&tile[r][c]) =
                __ldg(reinterpret_cast<const uint2*>(input + (row + r) * arguments.input_row_stride + column + c));
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 64 * 8; i += blockDim.x) {
        const uint32_t c = i / 8, r = i % 8 * 8;
        if (row + r >= arguments.rows || column + c >= arguments.columns) continue;
        uint32_t words[2] = {};
#pragma unroll
        for (uint32_t j = 0; j < 8; ++j) words[j / 4] |= static_cast<uint32_t>(tile[r + j][c]) << j % 4 * 8;
        *reinterpret_cast<uint2*>(output + static_cast<int64_t>(column + c) * arguments.rows + row + r) = {words[0], words[1]};
    }
}

}  // namespace dj
