// What a block leaves of a product of decode_chain.cuh, and takes back when all have read it.
#pragma once
#include "chain_weights.cuh"

// silu(gate) * up. As silu_times, but that it has no division that is a function, for which registers would be set aside.
__device__ __forceinline__ float silu_product(half_t gate, half_t up) {
    const float a = to_float(gate);
    return __fdividef(a, 1.0f + exp2_approx(a * -1.44269504f)) * to_float(up);
}

// An output of a block: the sum of its warps' sums, always in the same order.
template <class Unpack>
__device__ __forceinline__ float add_chain_warps(const float* sums, int tile, int output) {
    const float* const from = sums + tile * CHAIN_WARPS * MMA_N + output;
    float total[4] = {};
#pragma unroll
    for (int warp = 0; warp < CHAIN_WARPS; ++warp) total[warp % 4] += from[warp * MMA_N];
    const float factor = output < MMA_N / 2 ? 1.0f : 1.0f / Bytes<Unpack>::HIGH;
    return ((total[0] + total[1]) + (total[2] + total[3])) * factor;
}

// A block's places among the parts of a product: put_sum(place, tile, output), and put_zero(place) for those that no block
// uses, which whoever has a tile's end has, too.
template <class Sum, class Zero>
__device__ __forceinline__ void each_part(const ChainShare& share, const Sum& put_sum, const Zero& put_zero) {
#pragma unroll 1
    for (int cell = this_thread(); cell < share.tiles * MMA_N; cell += CHAIN_THREADS) {
        const int tile = cell / MMA_N, part = tile == 0 ? share.part : 0;
        unsigned* const place = share.found + part * share.words + share.tile * MMA_N + cell;
        put_sum(place, tile, cell % MMA_N);
        if (part + 1 < share.parts && share.ends(tile)) put_zero(place + share.words);
    }
}

template <class Unpack>
__device__ __forceinline__ void leave_parts(int product) {
    const Space& space = chain_space();
    const auto put_sum = [&](unsigned* place, int tile, int output) {
        put(place, add_chain_warps<Unpack>(space.sums(), tile, output));
    };
    each_part(space.shares[product], put_sum, [](unsigned* place) { put(place, 0.0f); });
}
__device__ __forceinline__ void empty_parts(int product) {
    const auto take_back = [](unsigned* place, int, int) { empty(place); };
    each_part(chain_space().shares[product], take_back, [](unsigned* place) { empty(place); });
}

// A thread has one of a tile's 16 outputs; gates are eight lanes from what they gate.
template <class Unpack>
__device__ __forceinline__ void leave_gated() {
    const Space& space = chain_space();
    const ChainShare& share = space.shares[GATE_UP];
    const int cells = share.tiles * MMA_N;
#pragma unroll 1
    for (int begin = this_thread() / 32 * 32; begin < cells; begin += CHAIN_THREADS) {
        const int cell = begin + this_thread() % 32, output = cell % MMA_N;
        const int tile = min(cell / MMA_N, share.tiles - 1);
        const half_t own = to_half(add_chain_warps<Unpack>(space.sums(), tile, output));
        const half_t up = to_half(__shfl_xor_sync(0xFFFFFFFFu, to_float(own), MMA_N / 2));
        const float value = silu_product(own, up), next = __shfl_xor_sync(0xFFFFFFFFu, value, 1);
        if (cell < cells && output < MMA_N / 2 && output % 2 == 0) {
            const int at = (share.tile + tile) * (MMA_N / 2) + output;
            put(space.of.gated + at / 2, half_pair(value, next));
        }
    }
}
__device__ __forceinline__ void empty_gated() {
    constexpr int EACH = MMA_N / 4;  // words of a tile
    const Space& space = chain_space();
    const ChainShare& share = space.shares[GATE_UP];
#pragma unroll 1
    for (int i = this_thread(); i < share.tiles * EACH; i += CHAIN_THREADS) empty(space.of.gated + share.tile * EACH + i);
}
