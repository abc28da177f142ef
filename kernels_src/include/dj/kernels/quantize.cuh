// Quantization to E4M3 with one float32 scale per row and 128 columns, by lanes that hold neighbouring columns.
#pragma once
#include "dj/ptx/convert.cuh"

namespace dj {

constexpr float kE4m3Max = 448.0f;
constexpr float kSmallestMagnitude = 1e-4f;  // of a block: an empty one gets a finite scale above zero

// The clamp keeps NaN (a comparison with it is false); rounding comes after the clamp, so that the scale stays a power of two.
__device__ inline float scale_of(float largest, bool power_of_two) {
    const float scale = __fdiv_rn(largest < kSmallestMagnitude ? kSmallestMagnitude : largest, kE4m3Max);
    if (!power_of_two || !(scale < __int_as_float(0x7f800000))) return scale;
    const uint32_t bits = __float_as_uint(scale);
    return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

// Largest magnitude of the values of `kLanes` neighbouring lanes; a NaN wins. All lanes of the warp take part.
template <uint32_t kLanes, uint32_t kPerLane>
__device__ inline float largest_of(const float (&values)[kPerLane]) {
    float largest = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; ++i) largest = max_nan(largest, fabsf(values[i]));
#pragma unroll
    for (uint32_t distance = 1; distance < kLanes; distance *= 2)
        largest = max_nan(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    return largest;
}

// Writes values / scale; `output` is 4-byte aligned.
template <uint32_t kPerLane>
__device__ inline void store_quantized(uint32_t* output, const float (&values)[kPerLane], float scale) {
#pragma unroll
    for (uint32_t i = 0; i < kPerLane; i += 4)
        output[i / 4] = to_e4m3x4(__fdiv_rn(values[i], scale), __fdiv_rn(values[i + 1], scale), __fdiv_rn(values[i + 2], scale),
                                  __fdiv_rn(values[i + 3], scale));
}

// Eight bf16 of one 16-byte word.
__device__ inline void unpack_bf16(uint4 raw, float (&values)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        values[2 * i] = low_bf16(words[i]);
        values[2 * i + 1] = high_bf16(words[i]);
    }
}

__device__ inline uint4 pack_bf16(const float (&values)[8]) {
    return {to_bf16x2(values[0], values[1]), to_bf16x2(values[2], values[3]), to_bf16x2(values[4], values[5]),
            to_bf16x2(values[6], values[7])};
}

}  // namespace dj
