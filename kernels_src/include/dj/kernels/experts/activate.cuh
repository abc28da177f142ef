// Activation between the two GEMMs, on each pair's row: SiLU gates in their forms, or nothing where a callback has been; the result is
// quantized for the second GEMM or kept in bf16.
#pragma once
#include "dj/kernels/experts/rows.cuh"
#include "dj/ptx/dependent_launch.cuh"

namespace dj {

// Values of deepgemm_jit.runtime.launch.Gate.
constexpr uint32_t kPass = 0;         // columns as they are
constexpr uint32_t kSilu = 1;         // silu(x), not gated
constexpr uint32_t kSiluGate = 2;     // silu(gate) * up
constexpr uint32_t kClampedGate = 3;  // the same behind min(gate, limit) and clamp(up, -limit, limit)
constexpr uint32_t kAlphaGate = 4;    // (up + 1) * gate * sigmoid(alpha * gate) behind the same clamps

struct ActivateArguments {
    const uint16_t* input;       // (rows, columns), (rows, 2 * columns) when gated; bf16
    void* output;                // (rows, columns) E4M3 or bf16, rows follow each other
    float* scales;               // as in GatherArguments
    const float* static_scales;  // (experts), or null: dynamic
    Pairs pairs;
    int64_t input_stride;
    int64_t scales_stride;
    uint32_t columns;
    uint32_t gate;
    uint32_t interleaved;  // gate and up alternate instead of following each other
    float limit;
    float alpha;
};

// In the special function unit: a few units in the last place, where bf16 keeps 8 bits, for a fifth of the instructions.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// A NaN passes through a clamp, as in torch.
__device__ inline float clamp_high(float x, float high) { return x > high ? high : x; }
__device__ inline float clamp_low(float x, float low) { return x < low ? low : x; }

__device__ inline float gated(const ActivateArguments& arguments, float gate, float up) {
    if (arguments.gate == kSiluGate) return gate * sigmoid(gate) * up;
    gate = clamp_high(gate, arguments.limit);
    up = clamp_low(clamp_high(up, arguments.limit), -arguments.limit);
    if (arguments.gate == kClampedGate) return gate * sigmoid(gate) * up;
    return (up + 1.0f) * (gate * sigmoid(gate * arguments.alpha));
}

__device__ inline void activated(const ActivateArguments& arguments, const uint16_t* row, uint32_t column, float (&values)[8]) {
    // Not as memory that never changes: the kernel that writes it may have run when this one started.
    const auto load = [&](uint32_t at, float (&into)[8]) { unpack_bf16(*reinterpret_cast<const uint4*>(row + at), into); };
    if (arguments.gate <= kSilu) {
        load(column, values);
        if (arguments.gate == kSilu)
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i) values[i] = values[i] * sigmoid(values[i]);
        return;
    }
    float first[8], second[8];
    load(arguments.interleaved ? 2 * column : column, first);
    load(arguments.interleaved ? 2 * column + 8 : arguments.columns + column, second);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const float pair_gate = i < 4 ? first[2 * i] : second[2 * i - 8];
        const float pair_up = i < 4 ? first[2 * i + 1] : second[2 * i - 7];
        values[i] = arguments.interleaved ? gated(arguments, pair_gate, pair_up) : gated(arguments, first[i], second[i]);
    }
}

// Each warp takes 256 columns of one pair.
template <bool kQuantize>
__device__ inline void activate(const ActivateArguments& arguments) {
    const uint32_t pair = blockIdx.x * blockDim.y + threadIdx.y;
    const uint32_t column = blockIdx.y * 256 + threadIdx.x * 8;
    // The routing was complete before the GEMM began, which this kernel waits for.
    const int32_t row = pair < arguments.pairs.count ? arguments.pairs.rows[pair] : -1;
    wait_for_kernels_before();
    if (row < 0) return;  // the whole warp
    const bool inside = column < arguments.columns;
    float values[8] = {};
    if (inside) activated(arguments, arguments.input + row * arguments.input_stride, column, values);
    RowPart<kQuantize> part(arguments, values);
    if (inside) part.store(arguments, pair, row, column);
}

}  // namespace dj
