// paged_attention.cuh for int8 K and V, head_dim 96.
#include "paged_attention.cuh"

PAGED_DECODE(paged_decode_i8_96, 96, 1, 4)
