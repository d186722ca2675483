// Rows of one head, each in the registers of one warp: rotary embedding ("rotate half"), and storing into the cache. A lane
// holds pairs (i, i + dims / 2) of dimensions, which rotate together.
//
// int8: scale = fp16(max|x| / 127), value = round(x / scale) to nearest even, as in kv/int8.py. What is quantised has been
// rounded to fp16 first, as the torch path does. NaN or infinity makes the scale so, and the values 0.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

__device__ __forceinline__ signed char quantised(half_t x, float divisor) {
    return static_cast<signed char>(fminf(fmaxf(rintf(to_float(x) / divisor), -127.0f), 127.0f));
}

// The angles of one position, a lane's PAIRS of them: dims / 64 rounded up. cos, sin: dims / 2 of each.
template <int PAIRS>
struct Angles {
    half_t cosine[PAIRS], sine[PAIRS];

    __device__ __forceinline__ void load(const half_t* cos, const half_t* sin, int dims) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int i = threadIdx.x % 32 + j * 32;
            if (i < dims / 2) cosine[j] = cos[i], sine[j] = sin[i];
        }
    }
};

template <int PAIRS>
struct HeadRow {
    half_t first[PAIRS], second[PAIRS];

    __device__ __forceinline__ void load(const half_t* x, int dims) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int i = threadIdx.x % 32 + j * 32;
            if (i < dims / 2) first[j] = x[i], second[j] = x[i + dims / 2];
        }
    }

    __device__ __forceinline__ void rotate(const Angles<PAIRS>& angles, int dims) {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int i = threadIdx.x % 32 + j * 32;
            if (i >= dims / 2) continue;
            const float c = to_float(angles.cosine[j]), s = to_float(angles.sine[j]);
            const float a = to_float(first[j]), b = to_float(second[j]);
            first[j] = to_half(a * c - b * s), second[j] = to_half(b * c + a * s);
        }
    }

    __device__ __forceinline__ void store(half_t* out, int dims) const {
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int i = threadIdx.x % 32 + j * 32;
            if (i < dims / 2) out[i] = first[j], out[i + dims / 2] = second[j];
        }
    }

    // With all lanes of the warp.
    __device__ __forceinline__ void store(signed char* out, half_t* scale_out, int dims) const {
        float largest = 0.0f;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            if (threadIdx.x % 32 + j * 32 >= dims / 2) continue;
            largest = larger_or_nan(larger_or_nan(fabsf(to_float(first[j])), fabsf(to_float(second[j]))), largest);
        }
        for (int distance = 16; distance > 0; distance /= 2)
            largest = larger_or_nan(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
        const half_t scale = to_half(largest / 127.0f);
        const float divisor = to_float(scale);
        const bool usable = divisor > 0.0f && divisor <= 65504.0f;
        if (threadIdx.x % 32 == 0) *scale_out = scale;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const int i = threadIdx.x % 32 + j * 32;
            if (i >= dims / 2) continue;
            out[i] = usable ? quantised(first[j], divisor) : 0;
            out[i + dims / 2] = usable ? quantised(second[j], divisor) : 0;
        }
    }
};
