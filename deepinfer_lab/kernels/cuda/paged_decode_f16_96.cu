// paged_attention.cuh for fp16 K and V, head_dim 96.
#include "paged_attention.cuh"

PAGED_DECODE(paged_decode_f16_96, 96, 2, 3)
