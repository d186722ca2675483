// Many activation rows times a weight in tiles (quant/tiles.py), on the tensor cores of sm_90a: they read activations from
// shared memory by themselves, at twice the rate of mma.sync, while the warps that gave them their work prepare the next.
//
//   D[64 outputs, ROWS rows] += A[64 outputs, 16 of K: weights, in registers] * B[16 of K, ROWS rows: activations]
//
// A block owns OUTPUTS outputs of ROWS rows, and units (128 of K) of them, which lie in a ring of STAGES slots:
//
//   one slot: activations of k 0 .. 63 | of k 64 .. 127 | OUTPUTS / 16 units of weights, as they lie in tiles | their scales
//
// Its warps have three roles and meet at barriers only, two to a slot: `full` and `empty`.
//   Multipliers, TEAMS teams of ACROSS warpgroups: a warpgroup takes 64 outputs, a warp the 16 of one tile. Team i takes the
//     block's units i, i + TEAMS, ... A unit is two steps of 64 k: the warps decode the weights of one while the products of
//     the step before are under way. Scales are multiplied into the fragments.
//   Three row warps read activations into registers, some steps ahead, and store them.
//   One weight warp copies weights and scales. It begins before the kernels before its own are done, since they write neither.
//
// Which k stand where: lane 4g + t holds weights of k 8t .. 8t + 7 of a quarter (32 of K), where a product wants k 2t, 2t + 1,
// 2t + 8 and 2t + 9 of 16. So the 16 pairs of activations of a quarter, 4t + i, lie transposed, at 4i + t: word i of the 16
// bytes that a lane has read is in matrix i for stmatrix, and four lanes make up a row of it.
//
// Half a slot's activations are rows of 128 bytes in the 128-byte swizzle, chunk c of row r at 16 (c ^ r % 8).
#pragma once
#include "tile_units.cuh"
#include "wgmma_ptx.cuh"

constexpr int GROUP = 128, ROW_WARPS = 3;  // threads of a warpgroup

// How a kernel's blocks are cut. UNPACK: the weights' layout, `W4Tiles` or `W3Tiles`. AHEAD: halves of units' activations that
// are in the row warps' registers.
template <class UNPACK, int ACROSS_, int TEAMS_, int ROWS_, int STAGES_, int AHEAD_>
struct GroupCut {
    using Unpack = UNPACK;
    static constexpr int ACROSS = ACROSS_, TEAMS = TEAMS_, ROWS = ROWS_, STAGES = STAGES_, AHEAD = AHEAD_;
    static constexpr int OUTPUTS = 64 * ACROSS, TILES = OUTPUTS / MMA_N;
    static constexpr int TEAM = GROUP * ACROSS, MULTIPLIERS = TEAM * TEAMS;
    static constexpr int THREADS = MULTIPLIERS + 32 * ROW_WARPS + 32;
    static constexpr int PARTS = MMA_K / Unpack::UNIT_K, UNIT_BYTES = PARTS * Unpack::BYTES;
    // Bytes of a slot's parts. Scales: of as many groups as a unit can have.
    static constexpr int HALF = ROWS * 128, WEIGHTS = 2 * HALF, SCALES = WEIGHTS + TILES * UNIT_BYTES;
    static constexpr int TILE_SCALES = QUARTERS * 32, SLOT = (SCALES + TILES * TILE_SCALES + 1023) / 1024 * 1024;
    static constexpr int ITEMS = ROWS / 8 * TEAM;          // of four sums of a thread: see `four`
    static constexpr int SUMS = (TEAMS - 1) * ITEMS * 16;  // bytes, of all teams but the first
    static constexpr int BARRIERS = STAGES * SLOT + SUMS, SHARED = BARRIERS + 2 * STAGES * 8 + 16;
    static constexpr int ROW_STEP = 4 * ROW_WARPS, LOADS = (ROWS + ROW_STEP - 1) / ROW_STEP;  // of a row thread, of half a unit
    static constexpr int FILLERS = ROW_WARPS + 1 + 32;  // arrivals at a full slot: 33 are the weight warp's
    static_assert(TILES <= 32, "a lane of the weight warp orders one copy of a unit");
    static_assert(AHEAD % 2 == 0 && ROWS % 4 == 0, "whole units, and each half's registers are known");
    static_assert(HALF % 1024 == 0 && SLOT % 1024 == 0, "whole patterns of the swizzle");
};

// What a kernel is given.
struct Operands {
    const half_t* x;
    const char *tiles, *scales;
    const half_t* bias;
    half_t* out;
    float4* partial;
    unsigned* arrived;
    int m, n, k, group_shift;
};

// A slot and how often the ring went round before it.
template <int STAGES>
struct Turn {
    int slot;
    unsigned parity = 0;

    __device__ __forceinline__ explicit Turn(int slot) : slot(slot) {}
    __device__ __forceinline__ void advance(int slots) {
        slot += slots;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};

// The block's shared memory, and what it has to do.
template <class C>
struct Block {
    char* shared;
    int count, units, down, all, begin, end;  // tiles along N; units of K; blocks of rows; units of the output, and the block's

    __device__ __forceinline__ explicit Block(char* shared, const Operands& of) : shared(shared) {
        count = (of.n + MMA_N - 1) / MMA_N, units = (of.k + MMA_K - 1) / MMA_K, down = (of.m + C::ROWS - 1) / C::ROWS;
        all = (count + C::TILES - 1) / C::TILES * down * units;
        const int block = settled(blockIdx.x);  // each role its own registers: they have different numbers of them
        begin = share(block, all), end = share(block + 1, all);
    }
    __device__ __forceinline__ char* slot(int i) const { return shared + i * C::SLOT; }
    __device__ __forceinline__ float4* sums() const { return reinterpret_cast<float4*>(shared + C::STAGES * C::SLOT); }
    __device__ __forceinline__ PhaseBarrier* full(int slot) const {
        return reinterpret_cast<PhaseBarrier*>(shared + C::BARRIERS) + slot;
    }
    __device__ __forceinline__ PhaseBarrier* empty(int slot) const { return full(C::STAGES + slot); }
    __device__ __forceinline__ int* last() const { return reinterpret_cast<int*>(full(2 * C::STAGES)); }
    // Tiles that share weights follow one another: the second reader finds them in the L2.
    __device__ __forceinline__ int first_row(const Part& part) const { return part.tile % down * C::ROWS; }
    __device__ __forceinline__ int first_tile(const Part& part) const { return part.tile / down * C::TILES; }
};

// One arrival for a warp all of whose lanes are done.
__device__ __forceinline__ void leave(PhaseBarrier* barrier, int lane) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
}

#include "wgmma_results.cuh"

// The weight warp: a lane orders a bulk copy of a tile's weights, and copies pieces of scales. Where the output ends inside a
// tile there are none, and what was there meets only sums that are not stored.
template <class C>
__device__ __forceinline__ void copy_weights(const Block<C>& block, const Operands& of) {
    constexpr int PIECES = (C::TILES * C::TILE_SCALES / 16 + 31) / 32;  // of 16 bytes, of a lane, where groups are smallest
    const int lane = threadIdx.x % 32, shift = 8 - of.group_shift, scale_bytes = 16 << shift;  // of a tile's unit
    Turn<C::STAGES> turn(0);
    for (int at = block.begin; at < block.end;) {
        const Part part(at, block.end, block.units);
        const int first = block.first_tile(part), there = min(block.count - first, C::TILES);
        const auto unit = [&](int tile) { return static_cast<size_t>(first + tile) * block.units + part.begin; };
        const char* weights = of.tiles + unit(lane) * C::UNIT_BYTES;
        const char* scales[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int piece = lane + 32 * i;
            scales[i] = of.scales + unit(piece >> shift) * scale_bytes + (piece * 16 & scale_bytes - 1);
        }
        for (int i = 0; i < part.count; ++i) {
            PhaseBarrier* const full = block.full(turn.slot);
            char* const slot = block.slot(turn.slot);
            await(block.empty(turn.slot), turn.parity ^ 1);
            if (lane == 0) arrive_expecting(full, there * C::UNIT_BYTES);
            __syncwarp();
            if (lane < there) copy_bulk(slot + C::WEIGHTS + lane * C::UNIT_BYTES, weights, C::UNIT_BYTES, full);
            weights += C::UNIT_BYTES;
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int piece = lane + 32 * i, tile = piece >> shift;
                char* const to = slot + C::SCALES + tile * C::TILE_SCALES + (piece * 16 & scale_bytes - 1);
                if (tile < there) copy_async(to, scales[i], true);
                scales[i] += scale_bytes;
            }
            arrive_with_copies(full);
            turn.advance(1);
        }
        at += part.count;
    }
    await_previous();
}

// A row warp: takes four rows in twelve, and of them 64 of k at a time. Rows beyond M are whatever was there: they meet only
// sums that are not stored. Beyond K there must be zeros.
template <class C>
__device__ __forceinline__ void copy_rows(const Block<C>& block, const Operands& of, int warp) {
    const int lane = threadIdx.x % 32, row = 4 * warp + lane / 8, piece = lane % 8 * 8;
    const int step_bytes = 2 * C::ROW_STEP * of.k;
    // Where this lane says that 16 bytes go: chunk c of row r of the warp's four. Every other four are the latter of eight.
    const int r = lane % 8 / 2, c = lane % 2 * 4 + lane / 8;
    const int to = settled((4 * warp + r) * 128 + (c ^ r ^ warp % 2 * 4) * 16);
    const int most = C::LOADS - (4 * warp >= C::ROWS - (C::LOADS - 1) * C::ROW_STEP);  // loads of half a unit

    // The next load: from where in the thread's first row, and how many rows of it there are.
    int first_row = block.begin / block.units % block.down * C::ROWS, unit = block.begin % block.units, rows = 0;
    const char* from = nullptr;
    const auto begin_tile = [&] {
        from = reinterpret_cast<const char*>(of.x + static_cast<size_t>(first_row + row) * of.k);
        rows = min((of.m - first_row - row + C::ROW_STEP - 1) / C::ROW_STEP, most);
    };
    const auto load = [&](int half, uint4 (&to)[C::LOADS]) {
        const char* at = from + 2 * min(unit * MMA_K + half * 64 + piece, of.k - 8);
#pragma unroll
        for (int i = 0; i < C::LOADS; ++i, at += step_bytes) {
            load_ahead(to[i], at, i < rows);
        }
        if (half == 0 || ++unit < block.units) return;
        unit = 0, first_row += C::ROWS;
        if (first_row >= of.m) first_row = 0;
        begin_tile();
    };
    uint4 held[C::AHEAD][C::LOADS] = {};
    const int halves = 2 * (block.end - block.begin);
    begin_tile();
#pragma unroll
    for (int ahead = 0; ahead < C::AHEAD; ++ahead) {
        if (ahead < halves) load(ahead % 2, held[ahead]);
    }
    Turn<C::STAGES> turn(0);
    int left = of.k - block.begin % block.units * MMA_K;  // k from the slot's unit on
    for (int at = 0; at < halves; at += C::AHEAD) {
#pragma unroll
        for (int ahead = 0; ahead < C::AHEAD; ++ahead) {
            const int half = ahead % 2;
            if (at + ahead >= halves) break;
            if (half == 0) await(block.empty(turn.slot), turn.parity ^ 1);
            if (left < half * 64 + 64) {  // the same for all threads, and rarely so
#pragma unroll
                for (int i = 0; i < C::LOADS; ++i) clear(held[ahead][i], left <= half * 64 + piece);
            }
            __syncwarp();
            char* const slot = block.slot(turn.slot) + half * C::HALF;
#pragma unroll
            for (int i = 0; i < C::LOADS; ++i) {
                if (i < most) store_matrices(slot + (to ^ i % 2 * 64) + i * C::ROW_STEP * 128, held[ahead][i]);
            }
            if (at + ahead + C::AHEAD < halves) load(half, held[ahead]);
            if (half == 0) continue;
            leave(block.full(turn.slot), lane);
            turn.advance(1);
            left -= MMA_K;
            if (left <= 0) left = of.k;
        }
    }
}

// Of a matrix of rows of 128 bytes in the 128-byte swizzle, k along them: 1024 bytes from eight rows to the next eight.
__device__ __forceinline__ unsigned long long describe(const char* matrix) {
    return (shared_address(matrix) & 0x3FFFF) >> 4 | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}

// The A fragments of half a unit: 64 of k.
template <class C>
__device__ __forceinline__ void decode(const typename C::Unpack (&weights)[C::PARTS], const char* scales, int group_shift,
                                       int half, unsigned (&a)[4][4]) {
    constexpr int EACH = 8 / C::PARTS;  // products of a part
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int product = 4 * half + p, quarter = product / 2;
        const unsigned pair = *reinterpret_cast<const unsigned*>(scales + (quarter * 32 >> group_shift) * 32);
        const unsigned scale[2] = {__byte_perm(pair, 0, 0x1010), __byte_perm(pair, 0, 0x3232)};  // of outputs g, g + 8
        weights[product / EACH].fragment(product % EACH, a[p]);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[p][i] = mul_pair(a[p][i], scale[i % 2]);
    }
}

// A multiplier.
template <class C>
__device__ __forceinline__ void multiply(const Block<C>& block, const Operands& of) {
    const int team = threadIdx.x / C::TEAM, thread = threadIdx.x % C::TEAM, tile = thread / 32, lane = thread % 32;
    const int to_weights = settled(C::WEIGHTS + tile * C::UNIT_BYTES);
    const int to_scales = settled(C::SCALES + tile * C::TILE_SCALES + lane / 4 * 4);
    Turn<C::STAGES> turn(team);
    int next_unit = team;  // this team's next, from where the part begins
    for (int at = block.begin; at < block.end;) {
        const Part part(at, block.end, block.units);
        at += part.count;
        Sums<C> sum;
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; ++i) sum[i] = 0.0f, pin(sum[i]);
        unsigned a[2][4][4];
        int before = -1;  // the slot that the products under way read
        for (; next_unit < part.count; next_unit += C::TEAMS) {
            char* const slot = block.slot(turn.slot);
            await(block.full(turn.slot), turn.parity);
            publish_stores();  // here, since in a row warp this would wait for its loads, too
            typename C::Unpack weights[C::PARTS];
#pragma unroll
            for (int i = 0; i < C::PARTS; ++i) weights[i].load(slot + to_weights + i * C::Unpack::BYTES, lane);
            const unsigned long long rows = describe(slot);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                decode<C>(weights, slot + to_scales, of.group_shift, half, a[half]);
#pragma unroll
                for (int i = 0; i < 16; ++i) pin(a[half][i / 4][i % 4]);
                begin_products();
#pragma unroll
                for (int p = 0; p < 4; ++p) multiply_async<C::ROWS>(sum, a[half][p], rows + (half * C::HALF + p * 32) / 16);
                end_products();
                await_products<1>();
                if (half == 0 && before >= 0) leave(block.empty(before), lane);
            }
            before = turn.slot;
            turn.advance(C::TEAMS);
        }
        next_unit -= part.count;
        await_products<0>();
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; ++i) pin(sum[i]);
        if (before >= 0) leave(block.empty(before), lane);
        if constexpr (C::TEAMS > 1) add_teams<C>(block.sums(), team, thread, sum);
        if (team == 0) finish_part<C>(block, of, part, at == block.end, thread, sum);
    }
}

template <class C>
__device__ __forceinline__ void wgmma_block(const half_t* x, const char* tiles, const char* scales, const half_t* bias,
                                            half_t* out, float4* partial, unsigned* arrived, int m, int n, int k, int group) {
    const Operands of = {x, tiles, scales, bias, out, partial, arrived, m, n, k, __ffs(group) - 1};
    if (threadIdx.x == 0) {
        const Block<C> block(launch_patterns(), of);
        for (int slot = 0; slot < C::STAGES; ++slot) {
            start(block.full(slot), C::FILLERS);
            start(block.empty(slot), C::TEAM / 32);
        }
        publish_barriers();
    }
    release_next();
    __syncthreads();
    const int warp = threadIdx.x / 32 - C::MULTIPLIERS / 32;  // beyond the multipliers
    if (warp >= 0) {
        const Block<C> block(launch_patterns(), of);
        if (warp == ROW_WARPS) return copy_weights(block, of);
        await_previous();
        return copy_rows(block, of, warp);
    }
    const Block<C> block(launch_patterns(), of);
    await_previous();
    multiply(block, of);
}
