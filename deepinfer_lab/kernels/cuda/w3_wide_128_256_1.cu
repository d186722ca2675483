// Blocks of 256 activation rows and 128 outputs of a W3 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_128_256_1, W3Words, 2, 1, 256, 3, 3, 4)
