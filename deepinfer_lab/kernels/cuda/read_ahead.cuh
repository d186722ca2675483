// Blocks that have weights of the products to come brought to the L2, while those beside them do other work and wait.
#pragma once
#include "ptx.cuh"

constexpr int AHEAD_RANGES = 6;
constexpr int AHEAD_PIECE = 4096;  // bytes of one order: small, so that what is needed first comes first on all multiprocessors

// What is to be brought, in the order in which it is needed: `bytes`, a multiple of 16, from addresses that are, too.
struct Ahead {
    const unsigned char* from[AHEAD_RANGES];
    int bytes[AHEAD_RANGES];

    // The share of one of `blocks` blocks. A warp's lanes order one after the other, so pieces go round the warps first. Nobody
    // waits for them.
    __device__ __forceinline__ void bring(int block, int blocks) const {
        const int warps = blockDim.x / 32, turn = threadIdx.x % 32 * warps + threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < AHEAD_RANGES; ++i) {
            const int pieces = (bytes[i] + AHEAD_PIECE - 1) / AHEAD_PIECE;
            for (int piece = turn * blocks + block; piece < pieces; piece += 32 * warps * blocks) {
                const int at = piece * AHEAD_PIECE;
                prefetch_l2(from[i] + at, min(AHEAD_PIECE, bytes[i] - at));
            }
        }
    }
};
