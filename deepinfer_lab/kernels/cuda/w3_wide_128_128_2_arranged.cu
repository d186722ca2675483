// Blocks of 128 arranged activation rows and 128 outputs of a W3 weight in tiles, by two teams.
#include "wide.cuh"
WIDE_KERNEL(w3_wide_128_128_2_arranged, W3Words, 2, 2, 128, 4, 5, 2, true)
