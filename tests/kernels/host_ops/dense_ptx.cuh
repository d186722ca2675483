// Stands in for kernels/cuda/dense_ptx.cuh on a CPU.
#pragma once
#include "async_ptx.cuh"

inline void copy_once(char* to, const void* from, bool valid) { copy_async(to, from, valid); }
