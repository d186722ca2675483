// Some dozens of activation rows times a weight in tiles (quant/tiles.py): mma_unit.cuh's products, with the work spread so
// that each weight that was decoded meets many rows, and each activation that a block fetched meets many outputs.
//
// A block owns OUTPUTS outputs of ROWS rows, and units (64 or 128 of K) of them. Its warps are TEAMS teams. Team i takes the
// block's units i, i + TEAMS, ...: it copies their weights, scales and activations ahead into a ring of STAGES slots of its own,
// and waits for nobody else, so that one team decodes while another multiplies. Within a team, warps share the outputs (ACROSS
// of them) and the rows (DOWN). At the end the teams' sums meet in shared memory. Unlike mma_unit.cuh's users, scales are
// multiplied into the fragments: for 64 rows as few instructions as scaling sums, and half the registers.
//
//   one slot: ROWS rows of activations | OUTPUTS / 16 units of weights, as they lie in tiles | their scales, group by group
//
// A lane reads 16 bytes of an activation row at a time, which are its B fragments of two products. Eight lanes are served at
// once, four of a row and four of the next, so odd rows lie with their halves exchanged: no two of the eight share a bank.
//
// How blocks share the units of all tiles: tile_units.cuh.
#pragma once
#include "tile_units.cuh"

// How a kernel's blocks are cut. UNPACK: the weights' layout, as `W4Tiles` below.
template <class UNPACK, int OUTPUTS_, int ROWS_, int ACROSS_, int DOWN_, int TEAMS_, int STAGES_>
struct Cut {
    using Unpack = UNPACK;
    static constexpr int OUTPUTS = OUTPUTS_, ROWS = ROWS_, ACROSS = ACROSS_, DOWN = DOWN_, TEAMS = TEAMS_, STAGES = STAGES_;
    static constexpr int TILES = OUTPUTS / MMA_N, TEAM = 32 * ACROSS * DOWN, THREADS = TEAM * TEAMS;
    static constexpr int FRAGMENTS = TILES / ACROSS, COLUMNS = ROWS / MMA_ROWS / DOWN;  // of a warp: A and B fragments of 16 k
    static constexpr int K = Unpack::UNIT_K, QUARTERS = K / 32;
    // Bytes of a slot's parts. Scales: of as many groups as a unit can have.
    static constexpr int ROW = 2 * K, WEIGHTS = ROWS * ROW, SCALES = WEIGHTS + TILES * Unpack::BYTES;
    static constexpr int GROUP_SCALES = TILES * 32, SLOT = SCALES + QUARTERS * GROUP_SCALES;
    // Floats from one row of sums to the next, such that the lanes of a warp write to banks of their own.
    static constexpr int STRIDE = OUTPUTS + (36 - OUTPUTS % 32) % 32;
    static constexpr int RING = TEAMS * STAGES * SLOT, SUMS = TEAMS * ROWS * STRIDE * 4, SHARED = RING > SUMS ? RING : SUMS;
    static constexpr int ITEMS = ROWS * OUTPUTS / 4;  // of four outputs
    static_assert(TILES % ACROSS == 0 && ROWS / MMA_ROWS % (2 * DOWN) == 0, "whole fragments for a warp, in pairs along rows");
    static_assert(8 * TEAM % ROW == 0 && ROWS * ROW / 16 % TEAM == 0, "a thread's rows of activations are all even or all odd");
    static_assert(2 * TILES * QUARTERS <= TEAM && ITEMS % THREADS == 0, "a thread copies scales once, and adds equal parts");
};

// What one thread of a team copies, unit after unit, of one tile of the output.
template <class C>
struct Copies {
    static constexpr int PIECES = C::ROW / 16;
    static constexpr int ROW_STEP = C::TEAM / PIECES, TILE_STEP = C::TEAM / 32;  // from one copy of a thread to its next
    const char *x, *weights, *scales;  // of the thread's first row and first tile, at the team's next unit; scales: at unit 0
    int row_bytes, tile_bytes;         // of such a step
    int rows, tiles, left;             // how many there are from there on: rows, tiles, and k
    int to_rows, to_weights, to_scales;  // where they go in a slot; to_scales: 0 for nowhere
    int unit, group_shift;

    // From `unit` on. first_tile, tiles: along N.
    __device__ __forceinline__ Copies(const half_t* x, const char* weights, const char* scales, int m, int k, int group_shift,
                                      int first_row, int first_tile, int tiles, int units, int unit)
        : unit(unit), group_shift(group_shift) {
        const int thread = threadIdx.x % C::TEAM, lane = thread % 32, row = thread / PIECES, piece = thread % PIECES;
        this->x = reinterpret_cast<const char*>(x + static_cast<size_t>(first_row + row) * k + unit * C::K + piece * 8);
        row_bytes = k * (2 * ROW_STEP);
        rows = settled(m - first_row - row);
        left = k - unit * C::K - piece * 8;
        to_rows = settled(row * C::ROW + (piece ^ row % 2 * 4) * 16);
        const int tile = first_tile + thread / 32;
        this->weights = weights + (static_cast<size_t>(tile) * units + unit) * C::Unpack::BYTES + lane * 16;
        tile_bytes = units * (TILE_STEP * C::Unpack::BYTES);
        this->tiles = settled(tiles - tile);
        to_weights = settled(C::WEIGHTS + thread / 32 * C::Unpack::BYTES + lane * 16);
        // Scales of a tile and a group are two pieces.
        const int group = thread / (2 * C::TILES), part = thread % (2 * C::TILES), groups = units * C::K >> group_shift;
        this->scales = scales + (static_cast<size_t>(first_tile + part / 2) * groups + group) * 32 + part % 2 * 16;
        const bool takes = (group == 0 || group << group_shift < C::K) && first_tile + part / 2 < tiles;
        to_scales = settled(takes ? C::SCALES + thread * 16 : 0);
    }

    // One unit into a slot; the next time, the team's next one. Where the output ends inside a tile, what is beyond is zeros, or
    // whatever was there: it meets only sums that are not stored. Beyond K it must be zeros.
    __device__ __forceinline__ void fetch(char* slot) {
        const int there = left > 0 ? rows : 0;
#pragma unroll
        for (int i = 0; i < C::ROWS / ROW_STEP; ++i) {
            copy_async(slot + to_rows + i * ROW_STEP * C::ROW, x + static_cast<size_t>(i) * row_bytes, i * ROW_STEP < there);
        }
#pragma unroll
        for (int i = 0; i < (C::TILES + TILE_STEP - 1) / TILE_STEP; ++i) {
            if (C::TILES % TILE_STEP && i * TILE_STEP + threadIdx.x % C::TEAM / 32 >= C::TILES) break;
            char* const to = slot + to_weights + i * TILE_STEP * C::Unpack::BYTES;
#pragma unroll
            for (int part = 0; part < C::Unpack::BYTES; part += 512) {
                if (part + 512 > C::Unpack::BYTES && part + threadIdx.x % 32 * 16 >= C::Unpack::BYTES) break;
                copy_async(to + part, weights + static_cast<size_t>(i) * tile_bytes + part, i * TILE_STEP < tiles);
            }
        }
        if (to_scales) {
            copy_async(slot + to_scales, scales + static_cast<size_t>(unit * C::K >> group_shift) * 32, true);
        }
        x += C::TEAMS * C::ROW;
        weights += C::TEAMS * C::Unpack::BYTES;
        left -= C::TEAMS * C::K;
        unit += C::TEAMS;
    }
};

// Where a lane finds its parts of a slot: B fragments, of a unit's first quarter, A fragments and scales.
template <class C>
struct Places {
    int rows, weights, scales, group_shift, lane;

    __device__ __forceinline__ explicit Places(int group_shift) : group_shift(group_shift) {
        lane = threadIdx.x % 32;
        const int warp = threadIdx.x % C::TEAM / 32, across = warp % C::ACROSS, down = warp / C::ACROSS;
        const int g = lane / 4, t = lane % 4;
        rows = settled((down * C::COLUMNS * MMA_ROWS + g) * C::ROW + (t ^ g % 2 * 4) * 16);
        weights = settled(C::WEIGHTS + across * C::FRAGMENTS * C::Unpack::BYTES);
        scales = settled(C::SCALES + across * C::FRAGMENTS * 32 + g * 4);
    }
};

// sum += the products of one unit.
template <class C>
__device__ __forceinline__ void multiply(const char* slot, const Places<C>& at, float (&sum)[C::FRAGMENTS][C::COLUMNS][4]) {
    typename C::Unpack unpack[C::FRAGMENTS];
#pragma unroll
    for (int f = 0; f < C::FRAGMENTS; ++f) unpack[f].load(slot + at.weights + f * C::Unpack::BYTES, at.lane);
#pragma unroll
    for (int quarter = 0; quarter < C::QUARTERS; ++quarter) {
        const char* const rows = slot + (at.rows ^ quarter % 2 * 64) + quarter / 2 * 128;
        const char* const scales = slot + at.scales + (quarter * 32 >> at.group_shift) * C::GROUP_SCALES;
        unsigned a[2][C::FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < C::FRAGMENTS; ++f) {
            const unsigned pair = *reinterpret_cast<const unsigned*>(scales + f * 32);
            const unsigned scale[2] = {__byte_perm(pair, 0, 0x1010), __byte_perm(pair, 0, 0x3232)};  // of outputs g, g + 8
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                unpack[f].fragment(2 * quarter + p, a[p][f]);
#pragma unroll
                for (int i = 0; i < 4; ++i) a[p][f][i] = mul_pair(a[p][f][i], scale[i % 2]);
            }
        }
#pragma unroll
        for (int j = 0; j < C::COLUMNS; j += 2) {  // two at a time, so that products in a row add to different sums
            uint4 b[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                b[i] = *reinterpret_cast<const uint4*>(rows + (j + i) * MMA_ROWS * C::ROW);
            }
#pragma unroll
            for (int p = 0; p < 2; ++p) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int f = 0; f < C::FRAGMENTS; ++f) {
                        mma(sum[f][j + i], a[p][f], p ? b[i].z : b[i].x, p ? b[i].w : b[i].y);
                    }
                }
            }
        }
    }
}

// The teams' sums of units begin to end - 1 into shared memory, one after the other: [TEAMS][ROWS][STRIDE].
template <class C>
__device__ __forceinline__ void multiply_units(Copies<C> copies, char* shared, int begin, int end) {
    const int team = threadIdx.x / C::TEAM, turn = C::TEAMS > 1 ? team : 0;  // equal; known where there is one team
    const Places<C> places(copies.group_shift);
    char* const ring = shared + team * C::STAGES * C::SLOT;
    float sum[C::FRAGMENTS][C::COLUMNS][4] = {};
#pragma unroll
    for (int stage = 0; stage < C::STAGES - 1; ++stage) {
        if (copies.unit < end) copies.fetch(ring + stage * C::SLOT);
        commit_copies();
    }
    char *full = ring, *empty = ring + (C::STAGES - 1) * C::SLOT;  // slots: the next to be read, the next to be written
    const auto next = [&](char* slot) { return slot == ring + (C::STAGES - 1) * C::SLOT ? ring : slot + C::SLOT; };
    for (int unit = begin + turn; unit < end; unit += C::TEAMS) {
        wait_copies<C::STAGES - 2>();
        sync_team<C::TEAM, C::TEAMS>(turn);  // all have the slot's contents, and none still reads the slot before
        if (copies.unit < end) copies.fetch(empty);
        commit_copies();
        multiply<C>(full, places, sum);
        full = next(full);
        empty = next(empty);
    }
    __syncthreads();  // the sums lie where the rings were
    const int warp = threadIdx.x % C::TEAM / 32, across = warp % C::ACROSS, down = warp / C::ACROSS, lane = threadIdx.x % 32;
    float* const to = reinterpret_cast<float*>(shared) + team * C::ROWS * C::STRIDE;
#pragma unroll
    for (int f = 0; f < C::FRAGMENTS; ++f) {
#pragma unroll
        for (int j = 0; j < C::COLUMNS; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = (down * C::COLUMNS + j) * MMA_ROWS + lane % 4 * 2 + i % 2;
                to[row * C::STRIDE + (across * C::FRAGMENTS + f) * MMA_N + lane / 4 + i / 2 * 8] = sum[f][j][i];
            }
        }
    }
    __syncthreads();
}

// Four outputs of the block in one row: the teams' sums, added always in the same order.
template <class C>
__device__ __forceinline__ float4 add_teams(const char* shared, int item) {
    const int at = item / (C::OUTPUTS / 4) * C::STRIDE + item % (C::OUTPUTS / 4) * 4;
    float4 sum = *reinterpret_cast<const float4*>(shared + at * 4);
#pragma unroll
    for (int team = 1; team < C::TEAMS; ++team) {
        add(sum, *reinterpret_cast<const float4*>(shared + (team * C::ROWS * C::STRIDE + at) * 4));
    }
    return sum;
}

// Stores four outputs, what of them there is.
template <class C>
__device__ __forceinline__ void store(const float4& sum, int item, int first_row, int first_output,
                                      const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n) {
    const int row = first_row + item / (C::OUTPUTS / 4), output = first_output + item % (C::OUTPUTS / 4) * 4;
    if (row >= m || output >= n) return;
    const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
    half_t* const to = out + static_cast<size_t>(row) * n + output;
    half_t done[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) done[i] = output + i < n ? finish(sums[i], bias, output + i) : half_t(0);
    if (n % 4 == 0 && reinterpret_cast<size_t>(out) % 8 == 0) {
        *reinterpret_cast<uint2*>(to) = {done[0] | static_cast<unsigned>(done[1]) << 16,
                                         done[2] | static_cast<unsigned>(done[3]) << 16};
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (output + i < n) to[i] = done[i];
        }
    }
}

template <class C>
__device__ __forceinline__ void mma_block(const half_t* x, const char* __restrict__ tiles,
                                          const char* __restrict__ scales, const half_t* __restrict__ bias,
                                          half_t* __restrict__ out, float4* __restrict__ partial,
                                          unsigned* __restrict__ arrived, int m, int n, int k, int group) {
    char* const shared = reinterpret_cast<char*>(launch_shared());
    __shared__ bool last;
    take_turn();
    constexpr int STORED_K = C::Unpack::STORED_K;
    const int count = (n + MMA_N - 1) / MMA_N, units = (k + STORED_K - 1) / STORED_K * (STORED_K / C::K);
    const int down = (m + C::ROWS - 1) / C::ROWS;
    const int all = (count + C::TILES - 1) / C::TILES * down * units, block = blockIdx.x;
    const int end = share(block + 1, all);
    for (int at = share(block, all); at < end;) {
        // Tiles that share weights follow one another: the second reader finds them in the L2.
        const Part part(at, end, units);
        const int first_row = part.tile % down * C::ROWS, first_tile = part.tile / down * C::TILES;
        const Copies<C> copies(x, tiles, scales, m, k, __ffs(group) - 1, first_row, first_tile, count, units,
                               part.begin + threadIdx.x / C::TEAM);
        multiply_units<C>(copies, shared, part.begin, part.begin + part.count);
        const auto finished = [&](const float4& sum, int item) {
            store<C>(sum, item, first_row, first_tile * MMA_N, bias, out, m, n);
        };
        const Sharers sharers(part.tile, units, all);
        if (sharers.one()) {
#pragma unroll 4
            for (int item = threadIdx.x; item < C::ITEMS; item += C::THREADS) finished(add_teams<C>(shared, item), item);
        } else {
            float4* const own = partial + sharers.place(block) * C::ITEMS;
            for (int item = threadIdx.x; item < C::ITEMS; item += C::THREADS) own[item] = add_teams<C>(shared, item);
            __threadfence();  // a block that sees the counter sees the sums
            __syncthreads();
            if (threadIdx.x == 0) last = sharers.arrive(arrived);
            __syncthreads();
            if (last) add_parts<C::ITEMS, C::THREADS>(sharers, partial, threadIdx.x, C::ITEMS, finished);
        }
        __syncthreads();  // the next tile's copies overwrite the sums
        at += part.count;
    }
}
