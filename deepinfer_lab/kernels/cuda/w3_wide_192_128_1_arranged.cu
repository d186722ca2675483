// Blocks of 128 arranged activation rows and 192 outputs of a W3 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_192_128_1_arranged, W3Words, 3, 1, 128, 4, 5, 4, true)
