// From accumulators of swapped products (rows are columns of D) to rows of a bf16 output.
#pragma once
#include "dj/epilogue/store_rows.cuh"

namespace dj {

constexpr uint32_t kColumnsOfWarp = 16;  // of D, that one warp holds
constexpr uint32_t kRowsAtOnce = 8;      // of D, that go through shared memory at a time
constexpr uint32_t kColumnsPitch = 48;   // bytes: 32 of data; eight rows then start in different banks
constexpr uint32_t kBytesColumns = kRowsAtOnce * kColumnsPitch;

// stmatrix.x2.trans: two 8x8 matrices of 16-bit elements, each transposed.
__device__ inline void store_matrices_transposed(uint32_t row_address, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row_address), "r"(a), "r"(b) : "memory");
}

// Stores 8 rows x 16 columns of D by one warp: lane l holds columns l / 4 (a, b) and l / 4 + 8 (c, d) of rows l % 4 * 2 and the next.
// `rows` is the first of them, at the warp's first column; nothing outside the counts is touched.
__device__ inline void store_columns(float a, float b, float c, float d, uint8_t* strip, uint16_t* rows, int64_t row_stride,
                                     uint32_t row_count, uint32_t column_count) {
    const uint32_t lane = lane_id();
    __syncwarp();  // the strip's last readers are done
    store_matrices_transposed(shared_address(strip) + lane % 8 * kColumnsPitch + lane / 8 % 2 * 16, to_bf16x2(a, b),
                              to_bf16x2(c, d));
    __syncwarp();
    const uint32_t row = lane / 2;
    const uint32_t column = lane % 2 * 8;
    if (lane < 2 * kRowsAtOnce && row < row_count && column < column_count) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(strip + row * kColumnsPitch + column * 2);
        *reinterpret_cast<uint4*>(rows + row * row_stride + column) = chunk;
    }
}

}  // namespace dj
