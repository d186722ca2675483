// A decode step of one sequence in one launch: 4 bits in attention, 4 in the MLP.
#include "decode_chain.cuh"

DECODE_CHAIN(decode_chain_w4_w4, W4Tiles, W4Tiles)
