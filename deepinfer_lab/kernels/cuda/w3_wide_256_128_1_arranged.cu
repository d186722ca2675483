// Blocks of 128 arranged activation rows and 256 outputs of a W3 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_256_128_1_arranged, W3Words, 4, 1, 128, 4, 5, 2, true)
