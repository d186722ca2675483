// What becomes of the sums of wide.cuh, of which this is a part, where the teams of all blocks of a cluster share one tile's
// units: each writes its sums to its own block's shared memory, and then all warps of the cluster take shares of the tile, whose
// sums they read where they are. So no sum passes through the L2, where blocks of 256 outputs of 64 rows on all multiprocessors
// would leave 8.6 MB, and blocks wait for their neighbours only.
//
// A share is a tile's 16 outputs of 16 rows, a pair of items. They are added in the order of blocks and teams, whoever does it.
#pragma once

// For threads that have no sums.
__device__ __forceinline__ void join_split() {
    sync_cluster();
    sync_cluster();
}

template <class C>
__device__ __forceinline__ void finish_split(const Block<C>& block, const Operands& of, const Stretch& part, int warp,
                                             const Sums<C>& sum) {
    constexpr int SHARES = C::PAIRS * C::TILES, AT_ONCE = 4;
    const int lane = threadIdx.x % 32, first_row = block.first_row(part), first_tile = block.first_tile(part);
    const int tiles = min(block.count - first_tile, C::TILES), pairs = min((of.m - first_row + 15) / 16, C::PAIRS);
    float4* const sums = reinterpret_cast<float4*>(block.shared) + lane;
    sync_team<C::MULTIPLIERS>(0);  // all have done with slots and weights, whose place this is
#pragma unroll
    for (int pair = 0; pair < C::PAIRS; ++pair) {
        float4* const own = sums + ((warp / C::TILES * C::PAIRS + pair) * C::TILES + warp % C::TILES) * 64;
        own[0] = four<C>(sum, 2 * pair), own[32] = four<C>(sum, 2 * pair + 1);
    }
    sync_cluster();
    const int blocks = cluster_blocks(), sources = blocks * C::TEAMS;
    for (int share = blockIdx.x % blocks + warp * blocks; share < pairs * C::TILES; share += blocks * C::WARPS) {
        const int tile = share % C::TILES, pair = share / C::TILES;
        if (tile >= tiles) continue;
        float4 total[2] = {};
#pragma unroll 1
        for (int source = 0; source < sources; source += AT_ONCE) {
            float4 more[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int from = min(source + i, sources - 1);
                const float4* const its = sums + (from % C::TEAMS * SHARES + share) * 64;
                more[i][0] = load_from_block(its, from / C::TEAMS), more[i][1] = load_from_block(its + 32, from / C::TEAMS);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (source + i < sources) add(total[0], more[i][0]), add(total[1], more[i][1]);
            }
        }
        Results(of, block.staged(warp), first_row, (first_tile + tile) * MMA_N).store(total[0], total[1], pair);
    }
    sync_cluster();  // a block's shared memory is there until all have read it
}
