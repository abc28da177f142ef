// Fixed-width names and the few values that host and device share. NVRTC brings no standard headers and we bring none.
#pragma once

using int8_t = signed char;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

namespace dj {

constexpr uint32_t kWarp = 32;
constexpr uint32_t kWarpgroup = 128;
constexpr uint32_t kScaleBlock = 128;  // columns of A, rows and columns of B that share one scale

__device__ constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
__device__ constexpr uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

__device__ constexpr uint32_t max_of(uint32_t a, uint32_t b) { return a < b ? b : a; }

__device__ inline uint32_t lane_id() { return threadIdx.x % kWarp; }

// Tells the compiler that a value is the same in the whole warp, so that branches on it stay uniform.
__device__ inline uint32_t warp_uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }

// elect.sync: true in one lane. The compiler knows that a single thread goes on and keeps addresses in uniform registers.
__device__ inline bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred chosen;\n"
        "elect.sync _|chosen, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, chosen;\n"
        "}\n"
        : "=r"(elected));
    return elected != 0;
}

}  // namespace dj
