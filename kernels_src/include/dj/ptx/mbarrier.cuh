// Shared-memory barriers. PTX ISA: "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once
#include "dj/types.cuh"

namespace dj {

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// mbarrier.init
__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init and fence.proxy.async: the copy engine sees the initialised barriers.
__device__ inline void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.proxy.async, for the whole warp: what it read from shared memory is there before a copy that it lets go may overwrite it. The
// arrival alone can overtake a load whose value nobody has needed yet.
__device__ inline void fence_reads_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

// mbarrier.arrive by the lanes for which `arrives` holds. The default scope is the block: wider ones cost a fence of the whole GPU per
// k-block. A predicate and no branch: after a branch the compiler no longer takes the warp for converged.
__device__ inline void barrier_arrive_if(bool arrives, uint32_t barrier) {
    asm volatile(
        "{\n"
        ".reg .pred arrives;\n"
        "setp.ne.u32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}\n" ::"r"(barrier),
        "r"(static_cast<uint32_t>(arrives))
        : "memory");
}

// mbarrier.arrive.expect_tx: one arrival, and the phase also waits for `bytes` of bulk copies.
__device__ inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity: returns once the phase of the given parity has completed.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Position in a ring of stages: the parity of a stage's barriers alternates each round.
template <uint32_t kStages>
struct StageRing {
    uint32_t stage = 0;
    uint32_t phase = 0;
    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace dj
