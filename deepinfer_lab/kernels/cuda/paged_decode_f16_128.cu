// paged_attention.cuh for fp16 K and V, head_dim 128.
#include "paged_attention.cuh"

PAGED_DECODE(paged_decode_f16_128, 128, 2, 3)
