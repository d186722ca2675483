// The weights of a chain of products on their way through shared memory (decode_chain.cuh).
//
// Weights are nobody's output: one warp copies them into a ring in the order in which the block will need them, whatever
// product of whatever layer that is, a ring's length ahead. So the memory stays busy while the blocks wait for one another. A
// slot has CHAIN_WARPS units that follow one another, one for each of the warps that multiply, and then their scales.
#pragma once
#include "chain_space.cuh"

constexpr int SCALE_BYTES = 2 * MMA_N;  // of a unit: a group is 128 of k
// Bytes under way at once: with more, whatever else a block reads, and waits for, would stand in line behind them.
constexpr int UNDER_WAY = 26 * 1024;

// Bytes of a unit of 128 of k.
template <class Unpack>
__device__ constexpr int unit_bytes() { return MMA_K / Unpack::UNIT_K * Unpack::BYTES; }

// The ring, of `depth` slots, each with a barrier that is over when it is full and one for when it is empty. Attention, Mlp:
// the layouts of their weights.
template <class Attention, class Mlp>
struct Ring {
    static constexpr int MOST_BYTES = unit_bytes<Attention>() > unit_bytes<Mlp>() ? unit_bytes<Attention>() : unit_bytes<Mlp>();
    static constexpr int SCALES = CHAIN_WARPS * MOST_BYTES, BARRIERS = SCALES + CHAIN_WARPS * SCALE_BYTES;
    static constexpr int SLOT = BARRIERS + 2 * 8;
    const int first, end;  // bytes of shared memory
    int at;
    unsigned parity;

    // from: where the ring is.
    __device__ __forceinline__ Ring(int from, int depth, RingPlace place)
        : first(from), end(from + depth * SLOT), at(from + place.at), parity(place.parity) {}
    __device__ __forceinline__ RingPlace place() const { return {at - first, parity}; }
    __device__ __forceinline__ char* slot() const { return launch_patterns() + at; }
    __device__ __forceinline__ PhaseBarrier* full() const { return reinterpret_cast<PhaseBarrier*>(slot() + BARRIERS); }
    __device__ __forceinline__ PhaseBarrier* empty() const { return full() + 1; }
    // By one thread, before the others use it.
    __device__ __forceinline__ void begin() {
#pragma unroll 1
        for (; at < end; at += SLOT) start(full(), 1), start(empty(), CHAIN_WARPS);
        publish_barriers();
    }
    __device__ __forceinline__ void leave() {
        at += SLOT;
        if (at == end) at = first, parity ^= 1;
    }

    // All weights of the first `products` products, by one thread.
    __device__ __forceinline__ void copy_all(const ChainLayer* layer, const ChainShare* shares, int products) {
        constexpr int MOST = UNDER_WAY / (CHAIN_WARPS * (unit_bytes<Mlp>() + SCALE_BYTES));  // slots
        Ring oldest = *this;                                                                  // of those under way
        int under_way = 0;
#pragma unroll 1
        for (int product = QKV; products > 0; --products) {
            const ChainShare& share = shares[product];
            const size_t begin = share.tile * share.units + share.first;
            const int bytes = product < GATE_UP ? unit_bytes<Attention>() : unit_bytes<Mlp>();
            const char* tiles = layer->tiles[product] + begin * bytes;
            const char* scales = layer->scales[product] + begin * SCALE_BYTES;
#pragma unroll 1
            for (int left = share.count; left > 0; left -= CHAIN_WARPS) {
                const int count = min(left, CHAIN_WARPS);
                if (under_way < MOST) ++under_way;
                else await_or_trap(oldest.full(), oldest.parity), oldest.leave();
                await_or_trap(empty(), parity ^ 1);
                arrive_expecting(full(), count * (bytes + SCALE_BYTES));
                stream_bulk(slot(), tiles, count * bytes, full());
                stream_bulk(slot() + SCALES, scales, count * SCALE_BYTES, full());
                tiles += CHAIN_WARPS * bytes, scales += CHAIN_WARPS * SCALE_BYTES;
                leave();
            }
            if (++product == PRODUCTS) product = QKV, ++layer;
        }
    }
};

// Weights as bytes, as they lie in a word or nearly so: q + ZERO, and those of outputs 8 .. 15 HIGH times that. registers: of
// word w of two quarters of k (quant/tiles.py), for output g and g + 8 the four values of k, k + 2, k + 1 and k + 3.
//
// 4 bits: the lower halves of a word's bytes, and the upper ones.
template <class Unpack>
struct Bytes {
    static constexpr int ZERO = 8, HIGH = 16, WORDS = 4;

    static __device__ __forceinline__ void registers(const unsigned* words, int w, unsigned& low, unsigned& high) {
        low = words[w] & 0x0F0F0F0Fu, high = words[w] & 0xF0F0F0F0u;
    }
};
// 3 bits: pairs 4w and 4w + 2 of the sixteen, and 4w + 1 and 4w + 3, where they are brought to bits 0 and 8, and 3 and 11.
template <>
struct Bytes<W3Tiles> {
    static constexpr int ZERO = 4, HIGH = 8, WORDS = 3;

    // The bytes' lower bits or the next ones, bytes 0 and 2 of `even`, and 1 and 3 of `odd`.
    static __device__ __forceinline__ unsigned lower(unsigned even, unsigned odd) { return even & 0x00070007u | odd & 0x07000700u; }
    static __device__ __forceinline__ unsigned upper(unsigned even, unsigned odd) { return even & 0x00380038u | odd & 0x38003800u; }
    static __device__ __forceinline__ void registers(const unsigned* words, int w, unsigned& low, unsigned& high) {
        const unsigned a = words[0], b = words[1], c = words[2];
        if (w == 0) low = lower(a, a << 2), high = upper(a, a << 2);
        if (w == 1) low = lower(a >> 12, b << 5), high = upper(b << 3, b << 5);
        if (w == 2) low = lower(b >> 9, c << 8), high = upper(b >> 9, c << 8);
        if (w == 3) {
            const unsigned last = a >> 4 & 0x08000800u | b >> 3 & 0x10001000u | c >> 2 & 0x20002000u;  // pair 15, bit by bit
            low = lower(c >> 6, c >> 4), high = c >> 6 & 0x00380038u | last;
        }
    }
};

// Activations of a unit, as a product of lane 4g + t takes them: two bytes, as `keep_fours` (chain_digits.cuh) has made them,
// column 0 the upper, 1 the lower; zeros in the other six. Sums are whole numbers, and exact. ZERO times the activations' own
// comes off in the end, since weights are stored with so much more.
template <class Unpack>
struct Operand {
    uint4 b[2] = {};
    Total total = {};
    const char* digits;
    const Total* totals;
    bool there;

    __device__ __forceinline__ Operand(const Space& space, int g, int t)
        : digits(space.digits(g % 2) + 32 * t), totals(space.totals()), there(g < 2) {}
    __device__ __forceinline__ void load(int unit) {
        total = totals[unit];
        if (!there) return;
        const auto* const from = reinterpret_cast<const uint4*>(digits + unit * MMA_K);
        b[0] = from[0], b[1] = from[1];
    }
    struct Found {
        int sum[4];
        Total total;
    };
    __device__ __forceinline__ Found multiply(const unsigned* words) const {
        Found found = {{}, total};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Bytes<Unpack>::registers(words + p / 2 * Bytes<Unpack>::WORDS, p % 2 * 2 + i, a[2 * i], a[2 * i + 1]);
            }
            mma_bytes(found.sum, a, p % 2 ? b[p / 2].z : b[p / 2].x, p % 2 ? b[p / 2].w : b[p / 2].y);
        }
        return found;
    }
    // By lanes 4g: outputs g and g + 8, without the weights' scales, the latter HIGH-fold.
    static __device__ __forceinline__ float low(const Found& found) {
        return (found.sum[0] * 256 + found.sum[1] - Bytes<Unpack>::ZERO * found.total.sum) * found.total.step;
    }
    static __device__ __forceinline__ float high(const Found& found) {
        constexpr int ZERO = Bytes<Unpack>::ZERO * Bytes<Unpack>::HIGH;
        return (found.sum[2] * 256 + found.sum[3] - ZERO * found.total.sum) * found.total.step;
    }
};

// A lane's weights of a unit, and the scales of its outputs.
template <class Unpack>
struct Weights {
    static constexpr int PARTS = MMA_K / Unpack::UNIT_K, WORDS = sizeof(Unpack) / 4;
    unsigned word[PARTS * WORDS], scale;

    // Of the ring's next slot.
    template <class R>
    __device__ __forceinline__ void take(R& ring, int warp, int lane) {
        await_or_trap(ring.full(), ring.parity);
        const char* const from = ring.slot() + warp * unit_bytes<Unpack>();
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            Unpack part;
            part.load(from + i * Unpack::BYTES, lane);
#pragma unroll
            for (int j = 0; j < WORDS; ++j) word[i * WORDS + j] = part.word[j];
        }
        scale = reinterpret_cast<const unsigned*>(ring.slot() + R::SCALES + warp * SCALE_BYTES)[lane / 4];
        leave(ring, lane);
    }
    template <class R>
    static __device__ __forceinline__ void leave(R& ring, int lane) {
        __syncwarp();
        if (lane == 0) arrive(ring.empty());
        ring.leave();
    }
};

// A block's units of a product. Leaves of each tile of the block and each warp the sums of 16 outputs, to be multiplied as
// `Operand` says (chain_results.cuh does); complete after `sync_chain`. TILE_EACH: K has as many units as there are warps, so
// that each of a warp's is another tile's, and about the same activations. This is where most instructions are issued.
template <class Unpack, class R, bool TILE_EACH>
__device__ __forceinline__ void multiply_share(const ChainShare& share) {
    Space& space = chain_space();
    const unsigned thread = this_thread();
    const int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int units = share.units, count = share.count;
    float* to = space.sums() + warp * MMA_N + g;
    R ring(space.ring_at, space.of.depth, space.places[warp]);
    float sum[2] = {};
    int left_tiles = share.tiles;
    int unit = share.first + warp;  // of K, from the tile's first on
    const auto leave = [&] {
        if (t == 0) to[0] = sum[0], to[MMA_N / 2] = sum[1];
        sum[0] = sum[1] = 0.0f;
        to += CHAIN_WARPS * MMA_N, --left_tiles;
    };
    int left = (count - warp + CHAIN_WARPS - 1) / CHAIN_WARPS;  // units of this warp
    const bool idle = left < (count + CHAIN_WARPS - 1) / CHAIN_WARPS;  // in the last slot
    if (left > 0) {
        Weights<Unpack> weights;
        weights.take(ring, warp, lane);
        Operand<Unpack> operand(space, g, t);
#pragma unroll 1
        for (; unit >= units; unit -= units) leave();
        if (TILE_EACH) operand.load(unit);
#pragma unroll 1
        for (;;) {
            if (!TILE_EACH) operand.load(unit);
            const auto found = operand.multiply(weights.word);
            const float low = to_float(static_cast<half_t>(weights.scale));
            const float high = to_float(static_cast<half_t>(weights.scale >> 16));
            if (--left > 0) weights.take(ring, warp, lane);  // while products are under way
            sum[0] = fmaf(low, operand.low(found), sum[0]), sum[1] = fmaf(high, operand.high(found), sum[1]);
            if (left == 0) break;
            if (TILE_EACH) {
                leave();
            } else {
#pragma unroll 1
                for (unit += CHAIN_WARPS; unit >= units; unit -= units) leave();
            }
        }
    }
    if (idle) {
        await_or_trap(ring.full(), ring.parity);
        Weights<Unpack>::leave(ring, lane);
    }
#pragma unroll 1
    while (left_tiles > 0) leave();
    if (lane == 0) space.places[warp] = ring.place();
}
template <class Unpack, class R>
__device__ __forceinline__ void multiply_units(int product) {
    const ChainShare& share = chain_space().shares[settled(product)];
    if (share.units == CHAIN_WARPS) multiply_share<Unpack, R, true>(share);
    else multiply_share<Unpack, R, false>(share);
}
