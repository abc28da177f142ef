// What the warp-specialised GEMMs do before their roles part: shared memory, barriers, descriptors of operands, groups.
#pragma once
#include "dj/ptx/copy.cuh"
#include "dj/scheduler/layout.cuh"

namespace dj {

// Registers per thread with two consumer warpgroups: 65536 / 384 = 168 at entry; the producer needs few, the consumers get what it
// gives up.
constexpr uint32_t kProducerRegisters = 40;
constexpr uint32_t kConsumerRegisters = 232;

constexpr uint32_t kSwizzleRepeat = 1024;  // swizzled tiles start at multiples of it
constexpr uint32_t kBarrierBytes = 256;    // full and empty barriers of all stages, and B scales

// Dynamic shared memory comes with 16-byte alignment only; the host asks for the slack.
__device__ inline uint8_t* align_to_swizzle(uint8_t* shared) {
    return shared + (kSwizzleRepeat - shared_address(shared) % kSwizzleRepeat) % kSwizzleRepeat;
}

// A meeting of the block at which some warps need not stay: they arrive, the others wait for all. PTX ISA: "barrier.cta".
template <uint32_t kThreads>
__device__ inline void block_arrive() {
    asm volatile("barrier.cta.arrive 1, %0;" ::"n"(kThreads) : "memory");
}

template <uint32_t kThreads>
__device__ inline void block_wait() {
    asm volatile("barrier.cta.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Barriers of all stages, by one thread.
template <uint32_t kStages>
__device__ inline void init_stages(uint32_t full, uint32_t empty, uint32_t full_arrivals, uint32_t empty_arrivals) {
    for (uint32_t stage = 0; stage < kStages; ++stage) {
        barrier_init(full + stage * 8, full_arrivals);
        barrier_init(empty + stage * 8, empty_arrivals);
    }
    fence_barrier_init();
}

}  // namespace dj
