// setmaxnreg: registers move between warpgroups. PTX ISA: "Miscellaneous Instructions: setmaxnreg".
#pragma once
#include "dj/types.cuh"

namespace dj {

template <uint32_t kCount>
__device__ inline void lower_registers_to() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <uint32_t kCount>
__device__ inline void raise_registers_to() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace dj
