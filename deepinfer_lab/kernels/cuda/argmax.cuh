// The position of the largest of each row, one block a row. Of equals the first; NaN is larger than any number, as in torch.
#pragma once
#include "ptx.cuh"

constexpr int ARGMAX_THREADS = 512;

struct Candidate {
    float value;
    int index;
};
__device__ __forceinline__ bool beats(Candidate a, Candidate b) {
    if (a.value != a.value) return b.value == b.value || a.index < b.index;
    return a.value > b.value || (a.value == b.value && a.index < b.index);  // false where b is NaN
}
__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(half_t x) { return to_float(x); }

template <class Value>
__device__ __forceinline__ void argmax(const Value* __restrict__ x, long long* __restrict__ out, int columns) {
    __shared__ Candidate best_of[ARGMAX_THREADS];
    const Value* row = x + static_cast<size_t>(blockIdx.x) * columns;
    Candidate best = {__uint_as_float(0xFF800000u), 0x7FFFFFFF};  // minus infinity, after all others
#pragma unroll 8
    for (int i = threadIdx.x; i < columns; i += ARGMAX_THREADS) {
        const Candidate next = {as_float(row[i]), i};
        if (beats(next, best)) best = next;
    }
    best_of[threadIdx.x] = best;
    for (int stride = ARGMAX_THREADS / 2; stride > 0; stride /= 2) {
        __syncthreads();
        if (threadIdx.x < stride && beats(best_of[threadIdx.x + stride], best_of[threadIdx.x]))
            best_of[threadIdx.x] = best_of[threadIdx.x + stride];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = best_of[0].index;
}
