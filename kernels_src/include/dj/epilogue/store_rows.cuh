// From accumulator fragments to rows of a bf16 output, through a few rows of shared memory that belong to one warp.
#pragma once
#include "dj/ptx/convert.cuh"
#include "dj/ptx/mbarrier.cuh"

namespace dj {

struct Output {
    uint16_t* data;        // bf16
    int64_t group_stride;  // elements
    int64_t row_stride;    // elements, a multiple of 8

    __device__ uint16_t* at(uint32_t group, uint32_t row, uint32_t column) const {
        return data + group * group_stride + row * row_stride + column;
    }
};

// Columns that go through shared memory at a time: 128 bytes of a row.
constexpr uint32_t kStripColumns = 64;

template <uint32_t kColumns>
constexpr uint32_t kStrip = kColumns < kStripColumns ? kColumns : kStripColumns;

// Rows are padded by 16 bytes: the eight rows of a matrix then start in different banks.
template <uint32_t kColumns>
constexpr uint32_t kStripPitch = (kStrip<kColumns> + 8) * 2;

// A thread's share of a warp's 16 rows, as pairs of bf16 in the same order.
template <uint32_t kCount>
__device__ inline void to_bf16_pairs(const float (&values)[2 * kCount], uint32_t (&pairs)[kCount]) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) pairs[i] = to_bf16x2(values[2 * i], values[2 * i + 1]);
}

// Stores a warp's 16 rows x kColumns. Plain stores with a bound per row and per 8 columns: what lies outside is never touched.
template <uint32_t kColumns>
__device__ inline void store_rows(const uint32_t (&pairs)[kColumns / 4], uint8_t* strip, uint16_t* rows, int64_t row_stride,
                                  uint32_t row_count, uint32_t column_count) {
    constexpr uint32_t kPitch = kStripPitch<kColumns>;
    constexpr uint32_t kChunks = kStrip<kColumns> / 8;  // of 8 columns, 16 bytes
    const uint32_t lane = lane_id();
    const uint32_t write = shared_address(strip) + (lane % 16) * kPitch + (lane / 16) * 16;
#pragma unroll
    for (uint32_t first = 0; first < kColumns; first += kStrip<kColumns>) {
        __syncwarp();  // the strip's last readers are done
#pragma unroll
        for (uint32_t chunk = 0; chunk < kChunks; chunk += 2) {
            const uint32_t pair = (first / 8 + chunk) * 2;
            store_matrices(write + chunk * 16, pairs[pair], pairs[pair + 1], pairs[pair + 2], pairs[pair + 3]);
        }
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < 16 * kChunks / kWarp; ++i) {
            const uint32_t row = (i * kWarp + lane) / kChunks;
            const uint32_t column = (i * kWarp + lane) % kChunks * 8;
            if (row < row_count && first + column < column_count) {
                const uint4 chunk = *reinterpret_cast<const uint4*>(strip + row * kPitch + column * 2);
                *reinterpret_cast<uint4*>(rows + row * row_stride + first + column) = chunk;
            }
        }
    }
}

}  // namespace dj
