// Stands in for kernels/cuda/prefetch.cuh on a CPU.
#pragma once
#include "cuda_host.h"

// A read, so that the address sanitizer sees the address.
inline void prefetch_sector(const void* at) { static_cast<void>(*static_cast<const volatile char*>(at)); }
