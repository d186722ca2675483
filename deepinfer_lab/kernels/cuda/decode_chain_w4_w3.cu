// A decode step of one sequence in one launch: 4 bits in attention, 3 in the MLP.
#include "decode_chain.cuh"

DECODE_CHAIN(decode_chain_w4_w3, W4Tiles, W3Tiles)
