// paged_attention.cuh for int8 K and V, head_dim 80.
#include "paged_attention.cuh"

PAGED_DECODE(paged_decode_i8_80, 80, 1, 4)
