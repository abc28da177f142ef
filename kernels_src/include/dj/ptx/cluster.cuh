// Thread blocks of one cluster: who is who, barriers of all, and memory of another block. PTX ISA: "barrier.cluster", "mapa",
// "ld", "st.async", "mbarrier.arrive", "cp.async.bulk.tensor" (multicast).
#pragma once
#include "dj/ptx/copy.cuh"

namespace dj {

// %cluster_ctarank and %cluster_nctaid.x: 0 and 1 in a launch without clusters. For whole warps.
__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return warp_uniform(rank);
}

__device__ inline uint32_t cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    return warp_uniform(size);
}

// barrier.cluster, by all threads that have not exited. Relaxed: it orders nothing but the barriers of shared memory, which
// fence_barrier_init has made visible; a release would wait for all that the thread has stored, hundreds of cycles.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ inline void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The same for ordinary shared memory: what any thread wrote before is seen by all of the cluster afterwards.
__device__ inline void cluster_sync_memory() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// For cluster_wait: what the thread has read of other blocks is read.
__device__ inline void cluster_arrive_after_reads() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

// mapa: the address of the same place in the shared memory of another block of the cluster.
__device__ inline uint32_t address_in(uint32_t rank, uint32_t address) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// ld.shared::cluster: a word of any block.
__device__ inline uint32_t load_in_cluster(uint32_t remote) {
    uint32_t word;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(remote) : "memory");
    return word;
}

// mbarrier.arrive at a barrier of any block, as barrier_arrive_if: it orders reads of a stage before the copy that overwrites it.
__device__ inline void barrier_arrive_in_cluster_if(bool arrives, uint32_t remote_barrier) {
    asm volatile(
        "{\n"
        ".reg .pred arrives;\n"
        "setp.ne.u32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
        "}\n" ::"r"(remote_barrier),
        "r"(static_cast<uint32_t>(arrives))
        : "memory");
}

// The same with the scope of the cluster: also orders ordinary reads before the writes of the block that waits.
__device__ inline void barrier_release_in_cluster_if(bool arrives, uint32_t remote_barrier) {
    asm volatile(
        "{\n"
        ".reg .pred arrives;\n"
        "setp.ne.u32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n"
        "}\n" ::"r"(remote_barrier),
        "r"(static_cast<uint32_t>(arrives))
        : "memory");
}

// Waits for a phase and sees what other blocks of the cluster wrote before it completed.
__device__ inline void barrier_wait_in_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// st.async: 16 bytes to any block; the barrier beside them counts the bytes.
__device__ inline void store_async(uint32_t remote, float a, float b, float c, float d, uint32_t remote_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
                 "f"(a), "f"(b), "f"(c), "f"(d), "r"(remote_barrier)
                 : "memory");
}

// cp.async.bulk.tensor to the same place in all blocks of `ranks`, a bit for each; the barrier at the same place in each counts.
__device__ inline void load_box_multicast(const TensorMap& map, uint32_t barrier, uint32_t destination, uint32_t x, uint32_t y,
                                          uint32_t z, uint16_t ranks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(ranks)
        : "memory");
}

}  // namespace dj
