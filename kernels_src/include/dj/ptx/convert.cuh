// Number formats. PTX ISA: "Data Movement and Conversion Instructions: cvt"; stmatrix; max.
#pragma once
#include "dj/types.cuh"

namespace dj {

// cvt.rn.bf16x2.f32: the first operand of the instruction lands in the upper half.
__device__ inline uint32_t to_bf16x2(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// cvt.rn.satfinite.e4m3x2.f32: saturates at 448, keeps NaN.
__device__ inline uint32_t to_e4m3x2(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline uint32_t to_e4m3x4(float a, float b, float c, float d) { return to_e4m3x2(a, b) | to_e4m3x2(c, d) << 16; }

// A bf16 is the upper half of a float32.
__device__ inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// max.NaN.f32: a NaN in a block must show in its scale, not vanish.
__device__ inline float max_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// stmatrix.x4: four 8x8 matrices of 16-bit elements from the accumulator's fragment order to rows of shared memory.
__device__ inline void store_matrices(uint32_t row_address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

}  // namespace dj
