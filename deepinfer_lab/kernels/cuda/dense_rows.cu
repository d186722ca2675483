// Up to four rows of activations times a dense weight [n, k], fp16: out = x @ weight.T + bias. k is a multiple of 8.
//
// So few rows take as long as reading the weight does, so nothing may keep that waiting. Warps go through pairs of the weight's
// rows, all warps of the grid in turn, and take 256 values of both at a time. Each lane copies its part to shared memory, some
// steps ahead and on into the warp's next pair, and reads only what it has copied itself: nobody waits for another warp.
//
// Sums are mma.m16n8k16's (mma.cuh), in which no value need be converted. With g = lane / 4, the lanes of group g hold k 32g to
// 32g + 31 of a step, of weights and of activations alike: of A, they are row g for the pair's first row and g + 8 for its
// second, of B column g. D[g, g] and D[g + 8, g] are then the group's sums; the rest of D belongs to nobody. The order of a sum
// depends on k alone: a row's result is the same bits however many rows there are.
//
// Grid: as many blocks as are resident. Shared memory: the warps' rings, then the activations, whole steps of each row; those
// of two rows, or of four where there are three.
#include "dense_ptx.cuh"
#include "norm.cuh"

constexpr int DENSE_WARPS = 8, DENSE_RING = 6, DENSE_STEP = 256;  // steps of a ring, and values of each row in one
constexpr int DENSE_SLOT = 2 * DENSE_STEP * sizeof(half_t);

// What one lane orders of its warp's pairs, a step at a time, each a group of copies.
struct DensePairs {
    const half_t* weight;
    int n, k, stride;
    char* ring;  // this lane's 16 bytes of each step's first row; those of the second lie half a slot further on
    int pair;
    int from = 0, slot = 0;

    __device__ __forceinline__ void order() {
        const int at = from + threadIdx.x % 32 * 8, row = 2 * pair;
        if (row < n) {
            const half_t* const values = weight + static_cast<size_t>(row) * k + at;
            char* const to = ring + slot * DENSE_SLOT;
            copy_once(to, values, at < k);
            copy_once(to + DENSE_SLOT / 2, row + 1 < n ? values + k : values, at < k);  // past the end: not stored
        }
        commit_copies();
        slot = slot + 1 == DENSE_RING ? 0 : slot + 1;
        from += DENSE_STEP;
        if (from >= k) from = 0, pair += stride;
    }
};

template <int ROWS>
__device__ __forceinline__ void multiply_dense(const half_t* x, const half_t* __restrict__ weight,
                                               const half_t* __restrict__ bias, half_t* out, int m, int n, int k) {
    constexpr int LANES = 32 / (2 * ROWS);  // to each result of a pair
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const int stride = DENSE_WARPS * gridDim.x, first = warp * gridDim.x + blockIdx.x;
    const int padded = (k + DENSE_STEP - 1) / DENSE_STEP * DENSE_STEP;
    char* const shared = reinterpret_cast<char*>(launch_shared());
    char* const ring = shared + warp * DENSE_RING * DENSE_SLOT + lane * sizeof(uint4);
    half_t* const rows = reinterpret_cast<half_t*>(shared + DENSE_WARPS * DENSE_RING * DENSE_SLOT);

    DensePairs ahead = {weight, n, k, stride, ring, first};
#pragma unroll 1
    for (int i = 0; i < DENSE_RING - 1; ++i) ahead.order();
    await_previous();  // weights are nobody's output; activations are
#pragma unroll 1
    for (int at = threadIdx.x * 8; at < padded; at += DENSE_WARPS * 32 * 8) {
        uint4 v[ROWS] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (r < m && at < k) v[r] = *reinterpret_cast<const uint4*>(x + r * k + at);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) *reinterpret_cast<uint4*>(rows + r * padded + at) = v[r];
    }
    __syncthreads();

    int slot = 0;
#pragma unroll 1
    for (int pair = first; 2 * pair < n; pair += stride) {
        float sum[ROWS][4] = {};
#pragma unroll 1
        for (int from = 0; from < k; from += DENSE_STEP) {
            wait_copies<DENSE_RING - 2>();
            ahead.order();  // into what the step before this one has read
            const uint4 a = *reinterpret_cast<const uint4*>(ring + slot * DENSE_SLOT);
            const uint4 b = *reinterpret_cast<const uint4*>(ring + slot * DENSE_SLOT + DENSE_SLOT / 2);
            slot = slot + 1 == DENSE_RING ? 0 : slot + 1;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const uint4 v = *reinterpret_cast<const uint4*>(rows + r * padded + from + lane * 8);
                mma(sum[r], {a.x, b.x, a.y, b.y}, v.x, v.y);
                mma(sum[r], {a.z, b.z, a.w, b.w}, v.z, v.w);
            }
        }
        float own[2 * ROWS];  // of each row, the pair's first result and its second
#pragma unroll
        for (int i = 0; i < 2 * ROWS; ++i) {
            const float* const d = sum[i / 2] + i % 2 * 2;
            own[i] = lane % 4 == g / 2 ? (g % 2 ? d[1] : d[0]) : 0.0f;
        }
        const float total = warp_sums(own);
        const int row = lane / LANES / 2, column = 2 * pair + lane / LANES % 2;
        if (lane % LANES == 0 && row < m && column < n) {
            out[static_cast<size_t>(row) * n + column] = to_half(bias ? total + to_float(bias[column]) : total);
        }
    }
}

extern "C" __global__ void __launch_bounds__(DENSE_WARPS * 32)
    dense_rows(const half_t* x, const half_t* weight, const half_t* bias, half_t* out, int m, int n, int k) {
    release_next();
    if (m == 1) multiply_dense<1>(x, weight, bias, out, m, n, k);
    else if (m == 2) multiply_dense<2>(x, weight, bias, out, m, n, k);
    else multiply_dense<4>(x, weight, bias, out, m, n, k);
}
