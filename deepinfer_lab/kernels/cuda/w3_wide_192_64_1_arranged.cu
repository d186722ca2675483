// Blocks of 64 arranged activation rows and 192 outputs of a W3 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_192_64_1_arranged, W3Words, 3, 1, 64, 7, 6, 4, true)
