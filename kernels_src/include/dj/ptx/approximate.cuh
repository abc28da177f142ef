// Functions of the special function unit, with subnormal numbers taken for zero. PTX ISA: "ex2", "rcp".
#pragma once
#include "dj/types.cuh"

namespace dj {

// ex2.approx: relative error below 2^-22.
__device__ inline float fast_exp2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// rcp.approx: at most one unit in the last place.
__device__ inline float fast_reciprocal(float x) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
    return reciprocal;
}

}  // namespace dj
