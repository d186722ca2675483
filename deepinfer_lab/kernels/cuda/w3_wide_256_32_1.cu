// Blocks of 32 activation rows and 256 outputs of a W3 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_256_32_1, W3Words, 4, 1, 32, 12, 6, 4, false)
