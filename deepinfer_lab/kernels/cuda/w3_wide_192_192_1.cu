// Blocks of 192 activation rows and 192 outputs of a W3 weight in tiles.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_192_192_1, W3Words, 3, 1, 192, 3, 5, 2)
