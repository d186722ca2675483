// Blocks of 192 arranged activation rows and 192 outputs of a W3 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_192_192_1_arranged, W3Words, 3, 1, 192, 3, 5, 2, true)
