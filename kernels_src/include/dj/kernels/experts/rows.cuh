// How the kernels of the experts forward find their rows: pair p is (token p / top_k, choice p % top_k).
#pragma once
#include "dj/kernels/quantize.cuh"

namespace dj {

struct Pairs {
    const void* experts;  // (tokens, top_k) int32 or int64, rows follow each other
    const int32_t* rows;  // (tokens, top_k): row of each pair in the grouped matrices, negative for a pair of no expert
    uint32_t count;       // tokens * top_k
    uint32_t top_k;
    uint32_t wide_experts;  // `experts` is int64

    __device__ int64_t expert(uint32_t pair) const {
        return wide_experts ? static_cast<const int64_t*>(experts)[pair] : static_cast<const int32_t*>(experts)[pair];
    }
};

// 8 columns of a row on their way to the grouped matrix: quantized with the scale of their 128 columns, or as bf16. All lanes of the
// warp make one, those beyond the row with zeros; each store is for the columns of one pair's row.
template <bool kQuantize>
class RowPart {
   public:
    template <class Arguments>
    __device__ RowPart(const Arguments& arguments, const float (&values)[8]) {
        const float largest = kQuantize && !arguments.static_scales ? largest_of<16>(values) : 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) values_[i] = values[i];
        if (kQuantize && !arguments.static_scales) quantize(scale_of(largest, false));
    }

    template <class Arguments>
    __device__ void store(const Arguments& arguments, uint32_t pair, int32_t row, uint32_t column) {
        const int64_t at = static_cast<int64_t>(row) * arguments.columns + column;
        if constexpr (kQuantize) {
            // A static scale belongs to the expert.
            if (arguments.static_scales) quantize(__ldg(arguments.static_scales + arguments.pairs.expert(pair)));
            *reinterpret_cast<uint2*>(static_cast<uint8_t*>(arguments.output) + at) = words_;
            if (column % kScaleBlock == 0) arguments.scales[column / kScaleBlock * arguments.scales_stride + row] = scale_;
        } else {
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(arguments.output) + at) = pack_bf16(values_);
        }
    }

   private:
    // value / scale, correctly rounded: a product with the reciprocal is at most one step off, and its remainder tells by how much
    // (Markstein). A third of what a division takes. Infinite operands have no remainder, and need none.
    __device__ static float quotient(float value, float scale, float inverse) {
        const float near = value * inverse;
        const float exact = fmaf(fmaf(-near, scale, value), inverse, near);
        return exact == exact ? exact : near;
    }

    __device__ void quantize(float scale) {
        const float inverse = __frcp_rn(scale);
        float v[8];
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) v[i] = quotient(values_[i], scale, inverse);
        words_ = {to_e4m3x4(v[0], v[1], v[2], v[3]), to_e4m3x4(v[4], v[5], v[6], v[7])};
        scale_ = scale;
    }

    float values_[8];
    float scale_;
    uint2 words_;
};

}  // namespace dj
