// What blocks leave for one another in decode_chain.cuh, and how they find it: words that say by themselves that they are
// there.
//
// A place is EMPTY until its word comes. Whoever needs it reads it until it is not: one way to the L2 and back, where a counter
// beside it would take three (a fence, the counter, the word). Each word stands for itself, so it does not matter in which
// order words become visible.
//
// The block that wrote a word empties its place when all have read it, as what it has found itself proves, and long before
// anybody looks there again: who does has found words that the block leaves only after it has emptied the place. With every
// block having something of every product and reading all that the phase before leaves:
//
//     after its part of     it empties          all have read it, for it has found all of      who looks again has found all of
//     qkv                   gated               down                                           o
//     o                     down                attention, for which all have made qkv         gated
//     gate_up               qkv, attention      o                                              down
//     down                  o                   gated                                          qkv
//
// (Of attention, splits' words are read by the blocks of their KV head alone, and what those make of them by all.)
//
// No fence stands between a place's being emptied and those later words: a store would have to be on its way for thousands of
// cycles while later ones of the same block arrive. A launch ends with gated and down of its last layer full, which the first
// layer of the next one empties, in its turn, like any other.
#pragma once
#include "grid_ptx.cuh"

constexpr unsigned EMPTY = 0xFFFFFFFFu;  // no number: one of the fp32 NaNs, or two of fp16

// NaN stays NaN.
__device__ __forceinline__ void put(unsigned* to, unsigned word) { put_word(to, word == EMPTY ? EMPTY - 1 : word); }
__device__ __forceinline__ void put(unsigned* to, float value) { put(to, __float_as_uint(value)); }
__device__ __forceinline__ void empty(unsigned* place) { put_word(place, EMPTY); }

__device__ __forceinline__ bool there(const uint4& v) {
    return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY;
}
__device__ __forceinline__ bool there(const uint2& v) { return v.x != EMPTY && v.y != EMPTY; }

// A thread's words at once. is_one: whether there is an i-th; the others are zeros. from: where it is.
template <int COUNT, class Words, class IsOne, class From>
__device__ __forceinline__ void ask(Words (&v)[COUNT], const IsOne& is_one, const From& from) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        v[i] = {};
        if (is_one(i)) v[i] = look(from(i));
    }
}
// What has been asked for, until all of it is there.
template <int COUNT, class Words, class From>
__device__ __forceinline__ void await_asked(Words (&v)[COUNT], const From& from) {
    Patience patience;
    for (;;) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) all = all && there(v[i]);
        if (all) return;
        patience.spend();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (!there(v[i])) v[i] = look(from(i));
        }
    }
}
template <int COUNT, class Words, class IsOne, class From>
__device__ __forceinline__ void await_words(Words (&v)[COUNT], const IsOne& is_one, const From& from) {
    ask(v, is_one, from);
    await_asked(v, from);
}
