// A tile of 16 positions of K and V in the registers of one warp, as the tensor cores want it, without passing shared memory.
//
// A product does not care in which order its terms are added. So each lane loads adjacent bytes, up to 16 at once, and calls
// them whatever the instruction (mma.cuh) expects there:
//   K: lane (g, t) loads a quarter of the rows of two positions. 4 adjacent values are columns 2t, 2t + 1, 2t + 8 and 2t + 9.
//   V: it loads an eighth of the rows of positions 4t to 4t + 3. 2 adjacent values are rows g and g + 8 of V^T.
//   Row r of S^T is position 4 (r / 2) + r % 2 for r < 8, and row r + 8 the second after it. Once the two 8 x 8 halves of P are
//   transposed, a lane has the probabilities of those positions whose V it loaded.
#pragma once
#include "mma.cuh"

__device__ constexpr int widest(int bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2; }
__device__ constexpr int words_of(int bytes) { return (bytes + 3) / 4; }

template <int BYTES>
__device__ __forceinline__ void load(unsigned* words, const unsigned char* address) {
    if constexpr (BYTES == 16) {
        const uint4 v = *reinterpret_cast<const uint4*>(address);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (BYTES == 8) {
        const uint2 v = *reinterpret_cast<const uint2*>(address);
        words[0] = v.x, words[1] = v.y;
    } else if constexpr (BYTES == 4) {
        words[0] = *reinterpret_cast<const unsigned*>(address);
    } else {
        words[0] = *reinterpret_cast<const unsigned short*>(address);
    }
}

// Four int8 to two pairs of fp16, exactly: 0x6400 + u is the fp16 number 1024 + u.
__device__ __forceinline__ void int8_to_half(unsigned bytes, unsigned& low, unsigned& high) {
    bytes ^= 0x80808080u;  // i + 128, unsigned
    low = sub_pair(__byte_perm(bytes, 0x64646464u, 0x4140), 0x64806480u);
    high = sub_pair(__byte_perm(bytes, 0x64646464u, 0x4342), 0x64806480u);
}

// How a row of D values is spread over lanes. SIZE: bytes of a value, 2 for fp16 and 1 for int8.
template <int D, int SIZE>
struct Spread {
    static constexpr int K_BYTES = widest(D * SIZE / 4), V_BYTES = widest(D * SIZE / 8);  // of one load
    static constexpr int K_LOADS = D * SIZE / 4 / K_BYTES, V_LOADS = D * SIZE / 8 / V_BYTES;
    static constexpr int K_WORDS = K_LOADS * words_of(K_BYTES), V_WORDS = V_LOADS * words_of(V_BYTES);
    static constexpr int STEPS = D / 16;  // instructions along D, for K as for V
    static constexpr int K_VALUES = K_BYTES / SIZE, V_VALUES = V_BYTES / SIZE;

    // The first of the 4 adjacent dimensions that lane t contributes to a step of q K^T.
    static __device__ __forceinline__ int k_dim(int step, int t) {
        const int load = step / (K_VALUES / 4), within = step % (K_VALUES / 4);
        return (load * 4 + t) * K_VALUES + within * 4;
    }
    // The first of the 2 adjacent dimensions that lane g contributes to a step of V^T P^T.
    static __device__ __forceinline__ int v_dim(int step, int g) {
        const int load = step / (V_VALUES / 2), within = step % (V_VALUES / 2);
        return (load * 8 + g) * V_VALUES + within * 2;
    }
};

// Where the positions of one sequence lie, for one KV head.
struct Pages {
    const long long* table;  // block of each block_size positions
    int block_size;
    unsigned reciprocal;  // ceil(2^32 / block_size), for positions below 2^32 / block_size
    int last;             // positions beyond it are not read, nor is anything before position 0

    // Four neighbours from a position that 4 divides: the slot of the first, and how many of the others exist. Beyond the last
    // position it is the last four once more: their scores are masked, and a finite number times 0 is 0.
    __device__ __forceinline__ int2 four(int position) const {
        position = max(min(position, last & ~3), 0);
        const int block = __umulhi(position, reciprocal);
        return {static_cast<int>(table[block]) * block_size + (position - block * block_size), max(last - position, 0)};
    }
    __device__ __forceinline__ int slot(int position) const { return four(position & ~3).x + position % 4; }
};

__device__ __forceinline__ const unsigned char* row_of(const unsigned char* base, int slot, unsigned stride) {
    return base + static_cast<unsigned long long>(static_cast<unsigned>(slot)) * stride;  // one instruction
}

// Tile in registers: K of two positions and V of four, as loaded, and what int8 is to be multiplied with.
template <int D, int SIZE>
struct Tile {
    using S = Spread<D, SIZE>;
    unsigned k[2][S::K_WORDS], v[4][S::V_WORDS];
    unsigned scales[2];  // of the two positions of K, which are those of the lane's scores: K's scale, and V's above it

    // The first and third of four neighbours, or the second and fourth where `odd` is 1.
    __device__ __forceinline__ void load_k(const unsigned char* base, const unsigned char* k_scales,
                                           const unsigned char* v_scales, int kv_heads, int2 four, int odd, int t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int slot = four.x + min(odd + 2 * i, four.y);
            const unsigned char* row = row_of(base, slot, kv_heads * (D * SIZE));
#pragma unroll
            for (int j = 0; j < S::K_LOADS; ++j)
                load<S::K_BYTES>(&k[i][j * words_of(S::K_BYTES)], row + (j * 4 + t) * S::K_BYTES);
            if constexpr (SIZE == 1) {
                const unsigned k_scale = *reinterpret_cast<const half_t*>(row_of(k_scales, slot, kv_heads * 2));
                const unsigned v_scale = *reinterpret_cast<const half_t*>(row_of(v_scales, slot, kv_heads * 2));
                scales[i] = k_scale | v_scale << 16;
            }
        }
    }

    __device__ __forceinline__ void load_v(const unsigned char* base, int kv_heads, int2 four, int g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char* row = row_of(base, four.x + min(i, four.y), kv_heads * (D * SIZE));
#pragma unroll
            for (int j = 0; j < S::V_LOADS; ++j)
                load<S::V_BYTES>(&v[i][j * words_of(S::V_BYTES)], row + (j * 8 + g) * S::V_BYTES);
        }
    }

    __device__ __forceinline__ void k_fragment(unsigned (&a)[4], int step) const {
        if constexpr (SIZE == 2) {
            a[0] = k[0][2 * step], a[1] = k[1][2 * step], a[2] = k[0][2 * step + 1], a[3] = k[1][2 * step + 1];
        } else {
            int8_to_half(k[0][step], a[0], a[2]);
            int8_to_half(k[1][step], a[1], a[3]);
        }
    }

    __device__ __forceinline__ void v_fragment(unsigned (&a)[4], int step) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // positions 0 and 1, then 2 and 3
            if constexpr (SIZE == 2) {
                a[2 * i] = __byte_perm(v[2 * i][step], v[2 * i + 1][step], 0x5410);
                a[2 * i + 1] = __byte_perm(v[2 * i][step], v[2 * i + 1][step], 0x7632);
            } else {
                constexpr int STEPS_PER_WORD = S::V_BYTES == 2 ? 1 : 2;
                const int word = step / STEPS_PER_WORD, selector = step % STEPS_PER_WORD ? 0x7362 : 0x5140;
                int8_to_half(__byte_perm(v[2 * i][word], v[2 * i + 1][word], selector), a[2 * i], a[2 * i + 1]);
            }
        }
    }
};
