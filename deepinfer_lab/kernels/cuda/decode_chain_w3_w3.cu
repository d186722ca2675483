// A decode step of one sequence in one launch: 3 bits.
#include "decode_chain.cuh"

DECODE_CHAIN(decode_chain_w3_w3, W3Tiles, W3Tiles)
