// Rotary embedding of q and k, and k and v into the cache, in one pass. A warp takes one head of one token (rope.cuh): query
// heads first, then K's, then V's. Grid: (tokens, (heads + 2 * kv_heads) / 4 rounded up).
#pragma once
#include "rope.cuh"
#include "dependent.cuh"

constexpr int ROPE_THREADS = 128, MAX_PAIRS = 4;  // so dims <= 256

// Strides in elements from one token to the next. Cache rows: [slots, kv_heads, dims], scales [slots, kv_heads].
template <class Cached>
__device__ __forceinline__ void rope_write(const half_t* q, const half_t* k,
                                           const half_t* v, const half_t* __restrict__ cos,
                                           const half_t* __restrict__ sin, const long long* positions,
                                           const long long* slots, half_t* __restrict__ q_out, Cached* k_cache,
                                           Cached* v_cache, half_t* k_scale, half_t* v_scale, int heads, int kv_heads, int dims,
                                           int q_stride, int k_stride, int v_stride) {
    take_turn();
    const int rows = heads + 2 * kv_heads, row = blockIdx.y * (ROPE_THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const size_t token = blockIdx.x;
    const bool is_q = row < heads, is_v = row >= heads + kv_heads;
    const int head = is_q ? row : is_v ? row - heads - kv_heads : row - heads;

    HeadRow<MAX_PAIRS> x;
    x.load((is_q ? q + token * q_stride : is_v ? v + token * v_stride : k + token * k_stride) + head * dims, dims);
    if (!is_v) {
        const size_t first = positions[token] * (dims / 2);
        Angles<MAX_PAIRS> angles;
        angles.load(cos + first, sin + first, dims);
        x.rotate(angles, dims);
    }
    if (is_q) return x.store(q_out + (token * heads + head) * dims, dims);
    const long long vector = slots[token] * kv_heads + head;
    Cached* out = (is_v ? v_cache : k_cache) + vector * dims;
    if constexpr (sizeof(Cached) == 1) {
        x.store(out, (is_v ? v_scale : k_scale) + vector, dims);
    } else {
        x.store(out, dims);
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
