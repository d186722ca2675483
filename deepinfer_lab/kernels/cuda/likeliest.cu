// Of each row of logits the largest and its place, as torch.max has them: NaN is larger than all else, and of equals the first
// counts. out: the values [rows], then the places [rows]; a zero has no sign. `last`, where given, has the places, too, and
// pinned host memory at the address *host the same as out, unless that is 0: the host sees it once the kernel is done.
// Grid: (rows, parts of a row). Each block leaves its part's largest in found [rows, parts], and the last of a row's blocks
// looks through them. `arrived` counts those, a counter to a row: zero before and after.
#include "max_ptx.cuh"
#include "dependent.cuh"

constexpr int LIKELIEST_TEAM = 256, LIKELIEST_WARPS = LIKELIEST_TEAM / 32;

// A value's order, and below it the complement of its place: the largest such number is what is looked for. 0 is none.
using Found = unsigned long long;

// Half precision as integers of the same order: zeros of either sign are equal, and NaN is above all.
__device__ __forceinline__ unsigned order_of(unsigned half) {
    if ((half & 0x7FFFu) > 0x7C00u) return 0xFFFFu;
    return half & 0x8000u ? 0x10000u - half : 0x8000u + half;
}
__device__ __forceinline__ half_t half_of_order(unsigned order) { return order < 0x8000u ? 0x10000u - order : order - 0x8000u; }

__device__ __forceinline__ Found larger(Found a, Found b) { return a > b ? a : b; }

__device__ __forceinline__ unsigned pair_at(const half_t* row, int at, int columns) {
    const unsigned low = at < columns ? row[at] : 0xFC00u, high = at + 1 < columns ? row[at + 1] : 0xFC00u;
    return low | high << 16;  // beyond the row: minus infinity, which comes after what it may equal
}

// Of eight values. ALIGNED: rows are whole eights, and so they all begin on 16 bytes.
template <bool ALIGNED>
__device__ __forceinline__ uint4 load_eight(const half_t* row, int unit, int columns) {
    const int at = unit * 8;
    if (ALIGNED) return *reinterpret_cast<const uint4*>(row + at);
    return {pair_at(row, at, columns), pair_at(row, at + 2, columns), pair_at(row, at + 4, columns),
            pair_at(row, at + 6, columns)};
}

// This thread's largest of the eights [unit, end). Only the largest of each eight is ordered, and its place is found once.
template <bool ALIGNED>
__device__ __forceinline__ Found largest(const half_t* row, int unit, int end, int columns) {
    constexpr int LOADS = ALIGNED ? 4 : 1;  // on their way at a time
    unsigned best = 0;
    int best_unit = 0;
    uint4 eight = {};
#pragma unroll 1
    for (unit += threadIdx.x; unit < end; unit += LIKELIEST_TEAM * LOADS) {
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (unit + i * LIKELIEST_TEAM < end) v[i] = load_eight<ALIGNED>(row, unit + i * LIKELIEST_TEAM, columns);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int its = unit + i * LIKELIEST_TEAM;
            if (its >= end) break;
            const unsigned pair = max_pair(max_pair(v[i].x, v[i].y), max_pair(v[i].z, v[i].w));
            const unsigned order = order_of(max_pair(pair, pair >> 16) & 0xFFFFu);
            if (order > best) best = order, best_unit = its, eight = v[i];
        }
    }
    if (best == 0) return 0;
    const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    unsigned first = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i)
        if (order_of(pairs[i / 2] >> 16 * (i % 2) & 0xFFFFu) == best) first = i;
    return static_cast<Found>(best) << 32 | ~(best_unit * 8 + first);
}

__device__ __forceinline__ Found largest_of_block(Found mine, Found* of_warps) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) mine = larger(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, distance));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < LIKELIEST_WARPS; ++warp) mine = larger(mine, of_warps[warp]);
    return mine;
}

extern "C" __global__ void __launch_bounds__(LIKELIEST_TEAM)
    likeliest(const half_t* logits, double* out, long long* last, double* const* host, Found* found, unsigned* arrived,
              int columns, int part) {
    __shared__ Found of_warps[LIKELIEST_WARPS];
    __shared__ bool is_last;
    take_turn();
    double* const on_host = host ? *host : nullptr;
    const int row = blockIdx.x, parts = gridDim.y, units = (columns + 7) / 8;
    const int unit = blockIdx.y * part, end = min(unit + part, units);
    const half_t* const values = logits + static_cast<size_t>(row) * columns;
    Found best = largest_of_block(
        columns % 8 ? largest<false>(values, unit, end, columns) : largest<true>(values, unit, end, columns), of_warps);
    if (parts > 1) {
        Found* const of_parts = found + static_cast<size_t>(row) * parts;
        if (threadIdx.x == 0) {
            of_parts[blockIdx.y] = best;
            __threadfence();  // a block that sees the counter sees what was found
            is_last = atomicInc(arrived + row, parts - 1) == static_cast<unsigned>(parts - 1);
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        best = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < parts; i += LIKELIEST_TEAM) best = larger(best, of_parts[i]);
        best = largest_of_block(best, of_warps);
    }
    if (threadIdx.x > 0) return;
    const unsigned place = ~static_cast<unsigned>(best);
    const double value = to_float(half_of_order(static_cast<unsigned>(best >> 32)));
    out[row] = value, out[gridDim.x + row] = place;
    if (last) last[row] = place;
    if (on_host) on_host[row] = value, on_host[gridDim.x + row] = place;
}
