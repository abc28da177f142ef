// Activation between the two GEMMs, on each pair's row: SiLU gates in their forms, or nothing where a callback has been; the result is
// quantized for the second GEMM or kept in bf16.
#pragma once
#include "dj/kernels/experts/rows.cuh"
#include "dj/ptx/approximate.cuh"
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

// In the special function unit: a few units in the last place, where FP8 keeps 4 bits, for a tenth of the instructions.
__device__ inline float sigmoid(float x) { return fast_reciprocal(1.0f + fast_exp2(-1.44269504f * x)); }

// A NaN passes through a clamp, as in torch.
__device__ inline float clamp_high(float x, float high) { return x > high ? high : x; }
__device__ inline float clamp_low(float x, float low) { return x < low ? low : x; }

constexpr uint32_t kActivatedParts = 2;  // of 256 columns each, whose loads are under way together

// What makes 8 columns of a row: themselves, or those of gate and up.
struct Sources {
    uint4 first;
    uint4 second;
};

__device__ inline Sources load_sources(const ActivateArguments& arguments, const uint16_t* row, uint32_t column) {
    const bool one = arguments.gate <= kSilu;
    const uint32_t first = !one && arguments.interleaved ? 2 * column : column;
    const uint32_t second = arguments.interleaved ? first + 8 : arguments.columns + column;
    // Not as memory that never changes: the kernel that writes it may have run when this one started.
    return {*reinterpret_cast<const uint4*>(row + first), one ? uint4{} : *reinterpret_cast<const uint4*>(row + second)};
}

template <class Gated>
__device__ inline void apply(const float (&gate)[8], const float (&up)[8], float (&values)[8], Gated gated) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) values[i] = gated(gate[i], up[i]);
}

__device__ inline void activated(const ActivateArguments& arguments, const Sources& sources, float (&values)[8]) {
    float gate[8], up[8];
    unpack_bf16(sources.first, gate);
    unpack_bf16(sources.second, up);
    if (arguments.interleaved && arguments.gate > kSilu) {
        float pairs[16];
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            pairs[i] = gate[i];
            pairs[i + 8] = up[i];
        }
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            gate[i] = pairs[2 * i];
            up[i] = pairs[2 * i + 1];
        }
    }
    const float limit = arguments.limit, alpha = arguments.alpha;
    const auto silu_gate = [](float g, float u) { return g * sigmoid(g) * u; };
    const auto clamped = [=](float u) { return clamp_low(clamp_high(u, limit), -limit); };
    switch (arguments.gate) {
        case kPass:
            return apply(gate, up, values, [](float g, float) { return g; });
        case kSilu:
            return apply(gate, up, values, [](float g, float) { return g * sigmoid(g); });
        case kSiluGate:
            return apply(gate, up, values, silu_gate);
        case kClampedGate:
            return apply(gate, up, values, [=](float g, float u) { return silu_gate(clamp_high(g, limit), clamped(u)); });
        default:
            return apply(gate, up, values, [=](float g, float u) {
                g = clamp_high(g, limit);
                return (clamped(u) + 1.0f) * (g * sigmoid(g * alpha));
            });
    }
}

// Each warp takes 512 columns of one pair.
template <bool kQuantize>
__device__ inline void activate(const ActivateArguments& arguments) {
    const uint32_t pair = blockIdx.x * blockDim.y + threadIdx.y;
    // The second GEMM may start with its weights: the routing was complete before the first one let this kernel start.
    let_next_kernel_start();
    const int32_t row = pair < arguments.pairs.count ? arguments.pairs.rows[pair] : -1;
    wait_for_kernels_before();
    if (row < 0) return;  // the whole warp
    const uint16_t* input = arguments.input + row * arguments.input_stride;
    uint32_t columns[kActivatedParts];
    Sources sources[kActivatedParts] = {};
#pragma unroll
    for (uint32_t part = 0; part < kActivatedParts; ++part) {
        columns[part] = (blockIdx.y * kActivatedParts + part) * 256 + threadIdx.x * 8;
        if (columns[part] < arguments.columns) sources[part] = load_sources(arguments, input, columns[part]);
    }
#pragma unroll
    for (uint32_t part = 0; part < kActivatedParts; ++part) {
        float values[8];
        activated(arguments, sources[part], values);
        RowPart<kQuantize> stored(arguments, values);
        if (columns[part] < arguments.columns) stored.store(arguments, pair, row, columns[part]);
    }
}

}  // namespace dj
