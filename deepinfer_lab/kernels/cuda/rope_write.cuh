// Rotary embedding of q and k ("rotate half"), and k and v into the cache, in one pass. A warp takes one head of one token:
// query heads first, then K's, then V's. A lane holds pairs (i, i + dims / 2) of dimensions, which rotate together.
// Grid: (tokens, (heads + 2 * kv_heads) / 4 rounded up).
//
// int8: scale = fp16(max|x| / 127), value = round(x / scale) to nearest even, as in kv/int8.py. What is quantised has been
// rounded to fp16 first, as the torch path does. NaN or infinity makes the scale so, and the values 0.
#pragma once
#include "ptx.cuh"

constexpr int ROPE_THREADS = 128, MAX_PAIRS = 4;  // a lane's: dims / 64 rounded up, so dims <= 256

__device__ __forceinline__ float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

__device__ __forceinline__ signed char quantised(half_t x, float divisor) {
    return static_cast<signed char>(fminf(fmaxf(rintf(to_float(x) / divisor), -127.0f), 127.0f));
}

// Strides in elements from one token to the next. Cache rows: [slots, kv_heads, dims], scales [slots, kv_heads].
template <class Cached>
__device__ __forceinline__ void rope_write(const half_t* q, const half_t* k,
                                           const half_t* v, const half_t* __restrict__ cos,
                                           const half_t* __restrict__ sin, const long long* positions,
                                           const long long* slots, half_t* __restrict__ q_out, Cached* k_cache,
                                           Cached* v_cache, half_t* k_scale, half_t* v_scale, int heads, int kv_heads, int dims,
                                           int q_stride, int k_stride, int v_stride) {
    take_turn();
    const int rows = heads + 2 * kv_heads, half_dims = dims / 2, lane = threadIdx.x % 32;
    const int row = blockIdx.y * (ROPE_THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const size_t token = blockIdx.x;
    const bool is_q = row < heads, is_v = row >= heads + kv_heads;
    const int head = is_q ? row : is_v ? row - heads - kv_heads : row - heads;
    const half_t* x = (is_q ? q + token * q_stride : is_v ? v + token * v_stride : k + token * k_stride) + head * dims;

    half_t first[MAX_PAIRS], second[MAX_PAIRS];
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < MAX_PAIRS; ++j) {
        const int i = lane + j * 32;
        if (i >= half_dims) continue;
        first[j] = x[i], second[j] = x[i + half_dims];
        if (!is_v) {
            const size_t angle = positions[token] * half_dims + i;
            const float c = to_float(cos[angle]), s = to_float(sin[angle]), a = to_float(first[j]), b = to_float(second[j]);
            first[j] = to_half(a * c - b * s), second[j] = to_half(b * c + a * s);
        }
        largest = larger_or_nan(larger_or_nan(fabsf(to_float(first[j])), fabsf(to_float(second[j]))), largest);
    }
    if (is_q) {
        half_t* out = q_out + (token * heads + head) * dims;
#pragma unroll
        for (int j = 0; j < MAX_PAIRS; ++j) {
            const int i = lane + j * 32;
            if (i < half_dims) out[i] = first[j], out[i + half_dims] = second[j];
        }
        return;
    }
    const long long vector = slots[token] * kv_heads + head;
    Cached* out = (is_v ? v_cache : k_cache) + vector * dims;
    if constexpr (sizeof(Cached) == 1) {
        for (int distance = 16; distance > 0; distance /= 2)
            largest = larger_or_nan(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
        const half_t scale = to_half(largest / 127.0f);
        const float divisor = to_float(scale);
        const bool usable = divisor > 0.0f && divisor <= 65504.0f;
        if (lane == 0) (is_v ? v_scale : k_scale)[vector] = scale;
#pragma unroll
        for (int j = 0; j < MAX_PAIRS; ++j) {
            const int i = lane + j * 32;
            if (i >= half_dims) continue;
            out[i] = usable ? quantised(first[j], divisor) : 0;
            out[i + half_dims] = usable ? quantised(second[j], divisor) : 0;
        }
    } else {
#pragma unroll
        for (int j = 0; j < MAX_PAIRS; ++j) {
            const int i = lane + j * 32;
            if (i < half_dims) out[i] = first[j], out[i + half_dims] = second[j];
        }
    }
}

#define ROPE_WRITE(NAME, CACHED)                                                                                              \
    extern "C" __global__ void __launch_bounds__(ROPE_THREADS)                                                                \
        NAME(const half_t* q, const half_t* k, const half_t* v, const half_t* cos, const half_t* sin,                         \
             const long long* positions, const long long* slots, half_t* q_out, CACHED* k_cache, CACHED* v_cache,             \
             half_t* k_scale, half_t* v_scale, int heads, int kv_heads, int dims, int q_stride, int k_stride, int v_stride) { \
        rope_write<CACHED>(q, k, v, cos, sin, positions, slots, q_out, k_cache, v_cache, k_scale, v_scale, heads, kv_heads,   \
                           dims, q_stride, k_stride, v_stride);                                                               \
    }
