// Enough of CUDA C++ to run a kernel on a CPU, one block at a time. Shared memory is really shared and barriers really wait, so
// that the sanitizers see what compute-sanitizer's memcheck and racecheck would look for.
//
// CUDA threads are fibers that take turns at every barrier: fast, and a barrier that not all threads reach is noticed. With
// HOST_THREADS they are threads of the operating system: slow, and the thread sanitizer sees their races.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct uint2 { unsigned x, y; };
struct int2 { int x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim3 { int x = 1, y = 1, z = 1; };

#ifdef HOST_THREADS
#include "host_threads.h"
#else
#include "host_fibers.h"
#endif

// Provided by either: threadIdx, blockIdx, blockDim, gridDim, __syncthreads(), sync_warp(), launch(grid, threads, kernel).

inline void __syncwarp() { sync_warp(); }

struct Slot { alignas(8) char bytes[8]; };
inline Slot exchange[2][1024];  // two, in turn: nobody is a whole shuffle ahead, so one barrier is enough
inline char turn[1024];

template <class T>
inline T from_thread(T value, int source) {
    const int now = turn[threadIdx.x] ^= 1;
    std::memcpy(exchange[now][threadIdx.x].bytes, &value, sizeof value);
    sync_warp();
    std::memcpy(&value, exchange[now][source].bytes, sizeof value);
    return value;
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int distance) { return from_thread(value, threadIdx.x ^ distance); }
template <class T>
inline T __shfl_sync(unsigned, T value, int lane) { return from_thread(value, threadIdx.x / 32 * 32 + lane); }

inline float __uint_as_float(unsigned bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
using std::fmaf;
inline void __trap() { std::abort(); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
