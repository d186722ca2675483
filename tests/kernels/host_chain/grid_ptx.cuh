// Stands in for kernels/cuda/grid_ptx.cuh on a CPU: a thread that waits lets others run.
#pragma once
#include "wgmma_ptx.cuh"

inline long long clock64() { return 1; }
inline unsigned __float_as_uint(float f) {
    unsigned bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}
struct Patience {
    void spend() { swapcontext(&fibers[threadIdx.x]->context, &scheduler); }
};
// A place that has a word already gets none but that which says that it is empty.
inline void put_word(unsigned* to, unsigned word) {
    if (*to != 0xFFFFFFFFu && word != 0xFFFFFFFFu) complain("a word is left where another one is");
    *to = word, progress = true;
}
inline uint4 look(const uint4* from) { return *from; }
inline uint2 look(const uint2* from) { return *from; }
inline void set_flag(int* flag, int value) { *flag = value; }
inline bool is_set(int* flag) { return *flag; }
inline void finish_reads() {}
inline void stream_bulk(char* to, const char* from, int bytes, PhaseBarrier* barrier) { copy_bulk(to, from, bytes, barrier); }
inline void await_or_trap(PhaseBarrier* barrier, unsigned parity) { await(barrier, parity); }
