// Warpgroup matrix multiply: ordering, descriptors, and the names that the wrapper cut from CUTLASS expects.
// PTX ISA: "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once
#include "dj/types.cuh"

// Stand-ins for what cute/arch/mma_sm90_gmma.hpp takes from other headers; the wrapper itself follows in a header of its own.
#define CUTE_HOST_DEVICE __device__ __forceinline__
#define CUTE_INVALID_CONTROL_PATH(message) __trap()
#define CUTE_ARCH_MMA_SM90A_ENABLED
namespace cutlass::arch {
template <class... Values>
__device__ inline void synclog_emit_wgmma_smem_smem(Values...) {}
template <class... Values>
__device__ inline void synclog_emit_wgmma_reg_smem(Values...) {}
}  // namespace cutlass::arch
namespace dj::GMMA {
enum class Major { K = 0, MN = 1 };
enum class ScaleOut { Zero = 0, One = 1 };
enum class ScaleIn { Neg = -1, One = 1 };
}  // namespace dj::GMMA

namespace dj {

// wgmma.fence: registers and shared memory written before are seen by the products that follow.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads and writes of an accumulator across the asynchronous products.
template <int kCount>
__device__ inline void hold(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// The same of an operand in registers, which products read until they complete.
template <int kCount>
__device__ inline void hold(uint32_t (&words)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// Descriptor of a K-major tile of 128-byte rows, 128-byte swizzle: address and offsets in units of 16 bytes, 8 rows lie 1024 bytes
// after the 8 before, swizzle mode 1 in bits 62 and 63. What differs from tile to tile is in the lower half, and addresses in the
// shared memory of a block (below 2^18) leave the bits above theirs alone: 32-bit sums of halves lead to other tiles.
constexpr uint64_t kDescriptorBase = (uint64_t(1) << 62) | (uint64_t(1024 / 16) << 32) | (uint64_t(1) << 16);

__device__ inline uint32_t descriptor_half(uint32_t tile_address) { return uint32_t(kDescriptorBase) + (tile_address >> 4); }
__device__ inline uint64_t whole_descriptor(uint32_t half) { return (kDescriptorBase >> 32 << 32) | half; }
__device__ inline uint64_t descriptor(uint32_t tile_address) { return whole_descriptor(descriptor_half(tile_address)); }

constexpr uint32_t kProductBytes = 32;         // of K that one product consumes: 32 of FP8, 16 of BF16
constexpr uint32_t kDescriptorStep = 32 / 16;  // descriptor units to the next product within a swizzled row

// Descriptor of an N-major tile (BF16 only): boxes of 64 columns, each a row of 128 bytes per k; the next 8 k lie 1024 bytes on, the
// next 64 columns a box of `box_bytes` on.
__device__ inline uint64_t descriptor_n_major(uint32_t tile_address, uint32_t box_bytes) {
    return (uint64_t(1) << 62) | (uint64_t(1024 / 16) << 32) | (uint64_t(box_bytes / 16) << 16) | ((tile_address & 0x3ffff) >> 4);
}

}  // namespace dj
