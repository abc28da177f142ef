// What the FP8 GEMMs are told beside their tensor maps.
#pragma once
#include "dj/epilogue/store_rows.cuh"
#include "dj/scheduler/layout.cuh"

namespace dj {

// Scales of A, M-major: the columns of a matrix, one per k-block, lie `column_stride` floats apart.
struct TokenScales {
    const float* data;
    int64_t group_stride;
    int64_t column_stride;
};

struct Fp8GemmArguments {
    TokenScales a_scales;   // for kernels with swapped operands; elsewhere they come through a tensor map
    const float* b_scales;  // (groups, ceil(N / 128), ceil(K / 128)); row scales come through a tensor map instead
    int64_t b_scales_group_stride;
    int64_t b_scales_row_stride;
    Output d;
    Shape shape;
    uint32_t k_blocks;
    uint32_t reads_b_once;      // or so close together that it need not stay in L2
    uint32_t waits_for_tokens;  // only A is still being written: B, scales and groups were there before the kernel in front began
};

}  // namespace dj
