// Asynchronous copies from global to shared memory. PTX ISA: "Data Movement and Conversion Instructions".
#pragma once
#include "dj/ptx/mbarrier.cuh"

namespace dj {

// The driver's CUtensorMap: opaque, passed as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

// prefetch.tensormap
__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// cp.async.bulk.tensor: one box of a 3D tensor; what lies outside the tensor arrives as zeros and counts as bytes all the same.
__device__ inline void load_box(const TensorMap& map, uint32_t barrier, uint32_t destination, uint32_t x, uint32_t y,
                                uint32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            destination),
        "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// createpolicy: what is read once leaves L2 first, so that it does not drive out what will be read again.
__device__ inline uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// The same under a cache policy. That of what is read as usual is none: evict_normal was measured a fifth slower.
__device__ inline void load_box(const TensorMap& map, uint32_t barrier, uint32_t destination, uint32_t x, uint32_t y, uint32_t z,
                                uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
        "%5}], "
        "[%2], %6;" ::"r"(destination),
        "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}

// cp.async.bulk: consecutive bytes; addresses and size are multiples of 16.
__device__ inline void load_bytes(uint32_t barrier, uint32_t destination, const void* source, uint32_t bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same under a cache policy.
__device__ inline void load_bytes(uint32_t barrier, uint32_t destination, const void* source, uint32_t bytes, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// cp.async of one float.
__device__ inline void load_float(uint32_t destination, const float* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}

// The same where `exists` holds; zero elsewhere, and then nothing is read.
__device__ inline void load_float_or_zero(uint32_t destination, const float* source, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(exists ? 4 : 0) : "memory");
}

// cp.async.mbarrier.arrive.noinc: one arrival once this thread's cp.async copies so far are there; the thread does not wait.
__device__ inline void arrive_when_loaded(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace dj
