// How the kernels of the experts forward find their rows: pair p is (token p / top_k, choice p % top_k).
#pragma once
#include "dj/types.cuh"

namespace dj {

struct Pairs {
    const void* experts;  // (tokens, top_k) int32 or int64, rows follow each other
    const int32_t* rows;  // (tokens, top_k): row of each pair in the grouped matrices, negative for a pair of no expert
    uint32_t count;       // tokens * top_k
    uint32_t top_k;
    uint32_t wide_experts;  // `experts` is int64

    __device__ int64_t expert(uint32_t pair) const {
        return wide_experts ? static_cast<const int64_t*>(experts)[pair] : static_cast<const int32_t*>(experts)[pair];
    }
};

}  // namespace dj
