// The weights of a chain of products on their way through shared memory (decode_chain.cuh).
//
// Weights are nobody's output: one warp copies them into a ring in the order in which the block will need them, whatever product
// of whatever layer that is, a ring's length ahead. So the memory stays busy while the blocks wait for one another. A slot has
// CHAIN_WARPS units that follow one another, one for each of the warps that multiply, and then their scales.
#pragma once
#include "chain_space.cuh"

constexpr int SCALE_BYTES = 2 * MMA_N;  // of a unit: a group is 128 of k

// Bytes of a unit of 128 of k.
template <class Unpack>
__device__ constexpr int unit_bytes() { return MMA_K / Unpack::UNIT_K * Unpack::BYTES; }

// How far a warp has come in the ring.
struct RingPlace {
    int slot = 0;
    unsigned parity = 0;
};

// The ring, of `depth` slots, each with a barrier that is over when it is full and one for when it is empty. Attention, Mlp: the
// layouts of their weights.
template <class Attention, class Mlp>
struct Ring {
    static constexpr int MOST_BYTES = unit_bytes<Attention>() > unit_bytes<Mlp>() ? unit_bytes<Attention>() : unit_bytes<Mlp>();
    static constexpr int SCALES = CHAIN_WARPS * MOST_BYTES, SLOT = SCALES + CHAIN_WARPS * SCALE_BYTES;
    char *const slots, *at;  // the first, the present one
    PhaseBarrier* const barriers;
    const int depth;
    RingPlace place;

    // from: where shared memory has the ring.
    __device__ __forceinline__ Ring(int from, int depth, RingPlace place)
        : slots(launch_patterns() + from), at(slots + place.slot * SLOT),
          barriers(reinterpret_cast<PhaseBarrier*>(slots + depth * SLOT)), depth(depth), place(place) {}
    __device__ __forceinline__ PhaseBarrier* full() const { return barriers + 2 * place.slot; }
    __device__ __forceinline__ PhaseBarrier* empty() const { return full() + 1; }
    // By one thread, before the others use it.
    __device__ __forceinline__ void begin() const {
        for (int i = 0; i < depth; ++i) start(barriers + 2 * i, 1), start(barriers + 2 * i + 1, CHAIN_WARPS);
        publish_barriers();
    }
    __device__ __forceinline__ void leave() {
        at += SLOT;
        if (++place.slot == depth) place.slot = 0, place.parity ^= 1, at = slots;
    }

    // All weights of the first `products` products, by one thread.
    __device__ __forceinline__ void copy_all(const ChainLayer* layer, const ChainShare* shares, int products) {
        for (int product = QKV; products > 0; --products) {
            const ChainShare& share = shares[product];
            const int bytes = product < GATE_UP ? unit_bytes<Attention>() : unit_bytes<Mlp>();
            const char* tiles = layer->tiles[product] + static_cast<size_t>(share.begin) * bytes;
            const char* scales = layer->scales[product] + static_cast<size_t>(share.begin) * SCALE_BYTES;
            for (int left = share.count; left > 0; left -= CHAIN_WARPS) {
                const int count = min(left, CHAIN_WARPS);
                await_copy(empty(), place.parity ^ 1);
                arrive_expecting(full(), count * (bytes + SCALE_BYTES));
                copy_bulk(at, tiles, count * bytes, full());
                copy_bulk(at + SCALES, scales, count * SCALE_BYTES, full());
                tiles += CHAIN_WARPS * bytes, scales += CHAIN_WARPS * SCALE_BYTES;
                leave();
            }
            if (++product == PRODUCTS) product = QKV, ++layer;
        }
    }
};

// The integers of 4 bits, as they are stored, q + 8, go into the products without being decoded: in the mantissa of a subnormal
// fp16 number they are (q + 8) * 2^-24 for output g of a lane and, four bits higher, (q + 8) * 2^-20 for output g + 8. The sums
// begin with what is too much, -8 times that of the activations; and are multiplied by powers of two in the end. All of this is
// exact, up to fp32's rounding of the sums. 5 instructions for 8 values. 3 bits have places of many powers of two: decoded.
template <class Unpack>
struct Encoded {
    static constexpr bool RAW = false;
    static constexpr float LOW = 1.0f, HIGH = 1.0f;  // of outputs 0 .. 7, and 8 .. 15
};
template <>
struct Encoded<W4Tiles> {
    static constexpr bool RAW = true;
    static constexpr float LOW = 16777216.0f, HIGH = 1048576.0f;
};
constexpr float TOO_MUCH = -8.0f / 16777216.0f, HIGH_OVER_LOW = 16.0f;

// A lane's weights of a unit, and the scales of its outputs.
template <class Unpack>
struct Weights {
    static constexpr int PARTS = MMA_K / Unpack::UNIT_K, EACH = 8 / PARTS;  // products of a part
    Unpack part[PARTS];
    unsigned scale;

    // Of the ring's next slot, in which there may be none for this warp: then it is something else that nobody uses.
    template <class R>
    __device__ __forceinline__ void take(R& ring, int warp, int lane) {
        await_copy(ring.full(), ring.place.parity);
        const char* const from = ring.at + warp * unit_bytes<Unpack>();
#pragma unroll
        for (int i = 0; i < PARTS; ++i) part[i].load(from + i * Unpack::BYTES, lane);
        scale = reinterpret_cast<const unsigned*>(ring.at + R::SCALES + warp * SCALE_BYTES)[lane / 4];
        __syncwarp();
        if (lane == 0) arrive(ring.empty());
        ring.leave();
    }

    __device__ __forceinline__ void fragment(int product, unsigned (&a)[4]) const {
        if constexpr (Encoded<Unpack>::RAW) {
            const unsigned word = part[product / EACH].word[product % EACH];
            a[0] = word & 0x000F000Fu, a[1] = word & 0x00F000F0u, a[2] = word >> 8 & 0x000F000Fu, a[3] = word >> 8 & 0x00F000F0u;
        } else {
            part[product / EACH].fragment(product % EACH, a);
        }
    }

    // sum += the products with a lane's eight activations of each quarter. shift: what is too much of each row.
    template <int ROWS>
    __device__ __forceinline__ void multiply(const uint4 (&b)[QUARTERS], const float (&shift)[ROWS], float (&sum)[1][4]) const {
        float found[2][4] = {};  // two chains: a product waits long for the one before it
        if constexpr (Encoded<Unpack>::RAW) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) found[0][r] = shift[r], found[0][2 + r] = shift[r] * HIGH_OVER_LOW;
        }
#pragma unroll
        for (int p = 0; p < 8; ++p) {
            unsigned a[4];
            fragment(p, a);
            mma(found[p % 2], a, p % 2 ? b[p / 2].z : b[p / 2].x, p % 2 ? b[p / 2].w : b[p / 2].y);
        }
        float all[1][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) all[0][i] = found[0][i] + found[1][i];
        add_scaled(sum, all, scale);
    }
};

// A block's units of a product. Leaves of each tile of the block and each warp the sums of 16 outputs of each row, to be
// multiplied as `Encoded` says; complete after `sync_chain`.
template <class Unpack, int ROWS, class R>
__device__ __forceinline__ RingPlace multiply_units(int product, RingPlace place) {
    const Space<ROWS>& space = space_of<ROWS>();
    const unsigned thread = this_thread();
    const int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int units = space.shares[product].units, count = space.shares[product].count;
    const half_t* const row = space.act() + min(g, ROWS - 1) * space.stride + 8 * t;
    const float* const shifts = space.shifts();
    float* to = space.sums() + warp * ROWS * MMA_N + g;
    R ring(space.ring_at, space.of.depth, place);
    float sum[1][4] = {}, shift[ROWS];
    uint4 b[QUARTERS] = {};  // of the rows that there are; the others' products are nobody's
    int left_tiles = space.shares[product].tiles(), held = -1;
    int unit = space.shares[product].begin % units + warp;  // of K, from the tile's first on
    const auto leave = [&] {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (2 * t + i % 2 < ROWS) to[(2 * t + i % 2) * MMA_N + i / 2 * 8] = sum[0][i];
            sum[0][i] = 0.0f;
        }
        to += CHAIN_WARPS * ROWS * MMA_N, --left_tiles;
    };
    const auto multiply = [&](const Weights<Unpack>& weights) {
        for (; unit >= units; unit -= units) leave();
        if (unit != held) {  // where K has as many units as there are warps, a warp has the same one of each tile
            held = unit;
#pragma unroll
            for (int i = 0; i < QUARTERS; ++i) {
                if (g < ROWS) b[i] = *reinterpret_cast<const uint4*>(row + unit * MMA_K + 32 * i);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) shift[r] = shifts[unit * ROWS + r];
        }
        weights.multiply(b, shift, sum);
        unit += CHAIN_WARPS;
    };
    // One is on its way from shared memory while the other is multiplied. What is defined only on some ways through a loop would
    // be kept through all of it: defined.
    Weights<Unpack> even = {}, odd = {};
    int left = count - warp;    // units, of this warp if more than 0
    const int slots = (count + CHAIN_WARPS - 1) / CHAIN_WARPS;
    even.take(ring, warp, lane);
#pragma unroll 1
    for (int i = 0; i < slots; i += 2, left -= 2 * CHAIN_WARPS) {
        if (i + 1 < slots) odd.take(ring, warp, lane);
        if (left > 0) multiply(even);
        if (i + 2 < slots) even.take(ring, warp, lane);
        if (left > CHAIN_WARPS) multiply(odd);
    }
    while (left_tiles > 0) leave();
    return ring.place;
}
