// Blocks of 32 activation rows and 64 outputs of a W3 weight in tiles, by four teams.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_64_32_4, W3Words, 1, 4, 32, 12, 6, 2)
