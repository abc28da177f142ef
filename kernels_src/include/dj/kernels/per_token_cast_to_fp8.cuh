// Cast of activations to E4M3 with one float32 scale per row and 128 columns. A scale is the block's largest magnitude over 448;
// scales are written M-major, as the GEMM's copy engine reads them.
#pragma once
#include "dj/kernels/quantize.cuh"

namespace dj {

struct CastArguments {
    const void* input;  // (m, k)
    uint32_t* output;   // (m, k) E4M3, rows follow each other
    float* scales;      // (m, ceil(k / 128)), column stride `scales_stride`
    int64_t input_stride;
    int64_t scales_stride;
    uint32_t m;
    uint32_t k;             // a multiple of 16
    uint32_t power_of_two;  // round scales up to powers of two (UE8M0)
};

struct Bf16 {
    static constexpr uint32_t kPerLane = 8;
    __device__ static void unpack(uint4 raw, float (&v)[kPerLane]) { unpack_bf16(raw, v); }
};

struct F32 {
    static constexpr uint32_t kPerLane = 4;
    __device__ static void unpack(uint4 raw, float (&v)[kPerLane]) {
        v[0] = __uint_as_float(raw.x);
        v[1] = __uint_as_float(raw.y);
        v[2] = __uint_as_float(raw.z);
        v[3] = __uint_as_float(raw.w);
    }
};

// Each warp takes one row; neighbouring warps take neighbouring rows, whose scales share a sector.
template <class Element, uint32_t kBlock>
__device__ inline void per_token_cast_to_fp8(const CastArguments& arguments) {
    constexpr uint32_t kPerLane = Element::kPerLane;
    constexpr uint32_t kLanes = kBlock / kPerLane;  // lanes that share a scale
    constexpr uint32_t kColumnsPerWarp = kWarp * kPerLane;
    const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
    const uint32_t column = blockIdx.y * kColumnsPerWarp + threadIdx.x * kPerLane;
    if (row >= arguments.m) return;  // the whole warp

    float values[kPerLane];
    const bool inside = column < arguments.k;
    const char* input = static_cast<const char*>(arguments.input) + (row * arguments.input_stride + column) * (16 / kPerLane);
    Element::unpack(inside ? __ldg(reinterpret_cast<const uint4*>(input)) : uint4{0, 0, 0, 0}, values);

    const float largest = largest_of<kLanes>(values);
    if (!inside) return;

    const float scale = scale_of(largest, arguments.power_of_two != 0);
    store_quantized(arguments.output + (static_cast<int64_t>(row) * arguments.k + column) / 4, values, scale);
    if (threadIdx.x % kLanes == 0) arguments.scales[column / kBlock * arguments.scales_stride + row] = scale;
}

}  // namespace dj
