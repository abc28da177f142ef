// Cast of activations to E4M3 with one float32 scale per row and 128 columns. A scale is the block's largest magnitude over 448;
// scales are written M-major, as the GEMM's copy engine reads them.
#pragma once
#include "dj/ptx/convert.cuh"

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

constexpr float kE4m3Max = 448.0f;
constexpr float kSmallestMagnitude = 1e-4f;  // of a block: an empty one gets a finite scale above zero

struct Bf16 {
    static constexpr uint32_t kPerLane = 8;
    __device__ static void unpack(uint4 raw, float (&v)[kPerLane]) {
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            v[2 * i] = low_bf16(words[i]);
            v[2 * i + 1] = high_bf16(words[i]);
        }
    }
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

// The clamp keeps NaN (a comparison with it is false); rounding comes after the clamp, so that the scale stays a power of two.
__device__ inline float scale_of(float largest, bool power_of_two) {
    const float scale = __fdiv_rn(largest < kSmallestMagnitude ? kSmallestMagnitude : largest, kE4m3Max);
    if (!power_of_two || !(scale < __int_as_float(0x7f800000))) return scale;
    const uint32_t bits = __float_as_uint(scale);
    return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

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

    float largest = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) largest = max_nan(largest, fabsf(values[i]));
#pragma unroll
    for (uint32_t distance = 1; distance < kLanes; distance *= 2)
        largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    if (!inside) return;

    const float scale = scale_of(largest, arguments.power_of_two != 0);
    uint32_t* output = arguments.output + (static_cast<int64_t>(row) * arguments.k + column) / 4;
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; i += 4)
        output[i / 4] = to_e4m3x4(__fdiv_rn(values[i], scale), __fdiv_rn(values[i + 1], scale), __fdiv_rn(values[i + 2], scale),
                                  __fdiv_rn(values[i + 3], scale));
    if (threadIdx.x % kLanes == 0) arguments.scales[column / kBlock * arguments.scales_stride + row] = scale;
}

}  // namespace dj
