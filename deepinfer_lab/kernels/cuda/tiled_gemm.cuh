// out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], tiled as in the article's section 2.2. A block owns 32 x 64 outputs and
// walks along K in steps of 32; no more than one 32 x 64 tile of weights ever exists in fp16.
//
// A thread owns 2 rows x 4 columns: for every k it meets 2 + 4 shared values in 8 FMAs, in fp32. `Unpack` is all that
// distinguishes W4 from W3: `fetch` reads a thread's packed bytes of a tile into registers, `store` unpacks them to shared_b.
// The next tile's bytes are fetched while the present one is multiplied, so that arithmetic does not wait for memory. The 65th
// column of shared_b staggers the banks that unpacking writes to.
#pragma once
#include "unpack.cuh"

constexpr int BM = 32, BN = 64, BK = 32, THREADS = 256, B_STRIDE = BN + 1;
constexpr int A_HALVES = 8;  // activations of one 16-byte read

// A thread's four of the BM x BK activations. Rows beyond m are zero: they meet real weights, whose products are never stored.
__device__ __forceinline__ uint2 fetch_a(const half_t* __restrict__ x, int m0, int k0, int m, int k) {
    const int row = m0 + threadIdx.x / 8, column = k0 + threadIdx.x % 8 * 4;
    if (row >= m) return {0, 0};
    return *reinterpret_cast<const uint2*>(x + static_cast<size_t>(row) * k + column);
}

__device__ __forceinline__ void store_a(half_t (&shared_a)[BM][BK], uint2 four) {
    *reinterpret_cast<uint2*>(&shared_a[threadIdx.x / 8][threadIdx.x % 8 * 4]) = four;
}

// The first of the thread's two rows and four columns of the tile.
__device__ __forceinline__ int output_row() { return threadIdx.x / 16 * 2; }
__device__ __forceinline__ int output_column() { return threadIdx.x % 16 * 4; }

__device__ __forceinline__ float low(unsigned pair) { return to_float(static_cast<half_t>(pair)); }
__device__ __forceinline__ float high(unsigned pair) { return to_float(static_cast<half_t>(pair >> 16)); }

// Four weights of row kk from a column that 4 divides, in as few reads as alignment allows: a row is 65 halves long, so that it
// begins on 8 bytes in every fourth row, on 4 in every second, and in odd rows the middle pair is aligned instead.
__device__ __forceinline__ void load_b(const half_t (&shared_b)[BK][B_STRIDE], int kk, int column, float (&b)[4]) {
    const half_t* p = &shared_b[kk][column];
    if (kk % 4 == 0) {
        const uint2 four = *reinterpret_cast<const uint2*>(p);
        b[0] = low(four.x), b[1] = high(four.x), b[2] = low(four.y), b[3] = high(four.y);
    } else if (kk % 2 == 0) {
        const unsigned first = *reinterpret_cast<const unsigned*>(p), last = *reinterpret_cast<const unsigned*>(p + 2);
        b[0] = low(first), b[1] = high(first), b[2] = low(last), b[3] = high(last);
    } else {
        const unsigned middle = *reinterpret_cast<const unsigned*>(p + 1);
        b[0] = to_float(p[0]), b[1] = low(middle), b[2] = high(middle), b[3] = to_float(p[3]);
    }
}

__device__ __forceinline__ void multiply(const half_t (&shared_a)[BM][BK], const half_t (&shared_b)[BK][B_STRIDE], int row,
                                         int column, float (&sum)[2][4]) {
#pragma unroll
    for (int k0 = 0; k0 < BK; k0 += A_HALVES) {
        float a[2][A_HALVES], b[4];
        load_activations(&shared_a[row][k0], a[0]);
        load_activations(&shared_a[row + 1][k0], a[1]);
#pragma unroll
        for (int i = 0; i < A_HALVES; ++i) {
            load_b(shared_b, k0 + i, column, b);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                sum[0][j] = fmaf(a[0][i], b[j], sum[0][j]);
                sum[1][j] = fmaf(a[1][i], b[j], sum[1][j]);
            }
        }
    }
}

// Adds up a thread's eight products over k_begin <= k < k_end, of which 32 divides the first.
template <class Unpack>
__device__ __forceinline__ void accumulate(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                                           const half_t* __restrict__ scales, int m, int n, int k, int group, int k_begin,
                                           int k_end, float (&sum)[2][4]) {
    __shared__ __align__(16) half_t shared_a[BM][BK];
    __shared__ __align__(16) half_t shared_b[BK][B_STRIDE];
    const int m0 = blockIdx.y * BM, n0 = blockIdx.x * BN;
    const int group_shift = __ffs(group) - 1;  // k >> group_shift = k / group
    if (k_begin >= k_end) return;              // the whole block

    Unpack weights;
    uint2 activations = fetch_a(x, m0, k_begin, m, k);
    weights.fetch(packed, scales, n0, k_begin, n, k, group_shift);
    for (int k0 = k_begin; k0 < k_end; k0 += BK) {
        store_a(shared_a, activations);
        weights.store(shared_b);
        __syncthreads();
        if (k0 + BK < k_end) {
            activations = fetch_a(x, m0, k0 + BK, m, k);
            weights.fetch(packed, scales, n0, k0 + BK, n, k, group_shift);
        }
        multiply(shared_a, shared_b, output_row(), output_column(), sum);
        __syncthreads();  // the next step overwrites both tiles
    }
}

template <class Unpack>
__device__ __forceinline__ void tiled_gemm(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                                           const half_t* __restrict__ scales, const half_t* __restrict__ bias,
                                           half_t* __restrict__ out, int m, int n, int k, int group) {
    float sum[2][4] = {};
    accumulate<Unpack>(x, packed, scales, m, n, k, group, 0, k, sum);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = blockIdx.y * BM + output_row() + i, column = blockIdx.x * BN + output_column() + j;
            if (row < m && column < n) out[static_cast<size_t>(row) * n + column] = finish(sum[i][j], bias, column);
        }
    }
}
