// A decode step of 2 rows in one launch: 4 bits in attention, 4 in the MLP.
#include "decode_chain.cuh"

DECODE_CHAIN(decode_chain_w4_w4_2, W4Tiles, W4Tiles, 2)
