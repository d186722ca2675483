// Blocks of 256 arranged activation rows and 128 outputs of a W4 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w4_wide_128_256_1_arranged, W4Words, 2, 1, 256, 3, 3, 4, true)
