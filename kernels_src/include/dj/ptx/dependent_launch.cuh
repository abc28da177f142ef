// Programmatic dependent launch. PTX ISA: "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once
#include "dj/types.cuh"

namespace dj {

// Waits until the kernels before this one in the stream are complete and their writes seen, then lets the next one start: it waits
// for this one in turn. In a launch without the attribute the first does nothing, and the second still lets a next one start that has it.
__device__ inline void wait_for_kernels_before() {
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// The two apart, where what comes next may start at once: it may rely on no more than what was complete when this one started.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace dj
