// The attention and element-wise kernels, and products, in one CPU program (requests.h).
#include "paged_decode_f16_64.cu"
#include "paged_decode_f16_80.cu"
#include "paged_decode_f16_96.cu"
#include "paged_decode_f16_128.cu"
#include "paged_decode_i8_64.cu"
#include "paged_decode_i8_80.cu"
#include "paged_decode_i8_96.cu"
#include "paged_decode_i8_128.cu"
#include "rms_norm.cu"
#include "silu_mul.cu"
#include "rope_write_f16.cu"
#include "rope_write_i8.cu"
#include "merge_attention.cu"
#include "w4_mma_8.cu"
#include "w4_mma_8_pair.cu"
#include "w4_mma_8_many.cu"
#include "w4_mma_16.cu"
#include "w4_mma_16_pair.cu"
#include "w4_mma_16_many.cu"
#include "w4_mma_32.cu"
#include "w4_mma_32_many.cu"
#include "w4_mma_8_norm.cu"
#include "w4_mma_8_pair_norm.cu"
#include "w4_mma_8_many_norm.cu"
#include "w3_mma_8.cu"
#include "w3_mma_8_pair.cu"
#include "w3_mma_8_many.cu"
#include "w3_mma_16.cu"
#include "w3_mma_16_pair.cu"
#include "w3_mma_16_many.cu"
#include "w3_mma_32.cu"
#include "w3_mma_32_many.cu"
#include "w3_mma_8_norm.cu"
#include "w3_mma_8_pair_norm.cu"
#include "w3_mma_8_many_norm.cu"
#include "w4_mma_block_64_16.cu"
#include "w4_mma_block_192_16.cu"
#include "w4_mma_block_64_32.cu"
#include "w4_mma_block_192_32.cu"
#include "w4_mma_block_64_64.cu"
#include "w4_mma_block_192_64.cu"
#include "w4_mma_block_64_128.cu"
#include "w4_mma_block_192_128.cu"
#include "w3_mma_block_64_16.cu"
#include "w3_mma_block_192_16.cu"
#include "w3_mma_block_64_32.cu"
#include "w3_mma_block_192_32.cu"
#include "w3_mma_block_64_64.cu"
#include "w3_mma_block_192_64.cu"
#include "w3_mma_block_64_128.cu"
#include "w3_mma_block_192_128.cu"
#include "w4_dequantise_tiles.cu"
#include "w3_dequantise_tiles.cu"
#include "embed.cu"
#include "fetch.cu"
#include "likeliest.cu"
#include "dense_rows.cu"
#include "requests.h"

int main() {
    using Decode = decltype(&paged_decode_f16_64);
    const Decode decode[] = {paged_decode_f16_64, paged_decode_f16_80, paged_decode_f16_96, paged_decode_f16_128,
                             paged_decode_i8_64,  paged_decode_i8_80,  paged_decode_i8_96,  paged_decode_i8_128};
    constexpr int FIRST_PRODUCT = 16;
    const decltype(&w4_mma_8) products[] = {
        w4_mma_8, w4_mma_8_pair, w4_mma_8_many, w4_mma_16, w4_mma_16_pair, w4_mma_16_many, w4_mma_32, w4_mma_32_many,
        w3_mma_8, w3_mma_8_pair, w3_mma_8_many, w3_mma_16, w3_mma_16_pair, w3_mma_16_many, w3_mma_32, w3_mma_32_many,
    };
    constexpr int FIRST_NORMED = 32;
    const decltype(&w4_mma_8_norm) normed[] = {
        w4_mma_8_norm, w4_mma_8_pair_norm, w4_mma_8_many_norm, w3_mma_8_norm, w3_mma_8_pair_norm, w3_mma_8_many_norm,
    };
    constexpr int FIRST_BLOCK = 38;
    const decltype(&w4_mma_block_64_16) of_blocks[] = {
        w4_mma_block_64_16, w4_mma_block_192_16, w4_mma_block_64_32, w4_mma_block_192_32,
        w4_mma_block_64_64, w4_mma_block_192_64, w4_mma_block_64_128, w4_mma_block_192_128,
        w3_mma_block_64_16, w3_mma_block_192_16, w3_mma_block_64_32, w3_mma_block_192_32,
        w3_mma_block_64_64, w3_mma_block_192_64, w3_mma_block_64_128, w3_mma_block_192_128,
    };
    const int first_unpack = FIRST_BLOCK + sizeof of_blocks / sizeof *of_blocks;
    serve([&](const int* h, const std::vector<Buffer>& b, const std::vector<double>& f) {
        const std::vector<int> n(f.begin(), f.end());
        const auto rope = [&](auto kernel) {
            kernel(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], n[0], n[1], n[2], n[3], n[4],
                   n[5]);
        };
        shared_bytes = std::make_unique<char[]>(h[6]);
        std::memset(shared_bytes.get(), 0xFF, h[6]);  // NaN
        const auto product = [&](auto kernel) {
            kernel(b[0], b[1], b[2], b[3], b[4], b[5], n[0], n[1], n[2], n[3], n[4]);
        };
        const auto blocks = [&](auto kernel) {
            kernel(b[0], b[1], b[2], b[3], b[4], b[5], b[6], n[0], n[1], n[2], n[3]);
        };
#ifndef HOST_THREADS
        shuffle_blocks = h[7];
#endif
        launch({h[1], h[2]}, h[3], [&] {
            switch (h[0]) {
                case 8: rms_norm(b[0], b[1], b[2], b[3], b[4], n[0], f[1]); break;
                case 9: rope(rope_write_f16); break;
                case 10: rope(rope_write_i8); break;
                case 11: silu_mul(b[0], b[1], n[0], n[1]); break;
                case 12: merge_attention(b[0], b[1], b[2], b[3], b[4], n[0], n[1], n[2], n[3]); break;
                default:
                    if (h[0] == first_unpack + 2) return embed(b[0], b[1], b[2], b[3], b[4], n[0], n[1], n[2]);
                    if (h[0] == first_unpack + 3) return fetch(b[0], b[1], n[0]);
                    if (h[0] == first_unpack + 4) return likeliest(b[0], b[1], b[2], b[3], b[4], b[5], n[0], n[1]);
                    if (h[0] == first_unpack + 5) return dense_rows(b[0], b[1], b[2], b[3], n[0], n[1], n[2]);
                    if (h[0] >= first_unpack) {
                        return (h[0] == first_unpack ? w4_dequantise_tiles : w3_dequantise_tiles)(b[0], b[1], b[2], n[0], n[1],
                                                                                                  n[2]);
                    }
                    if (h[0] >= FIRST_BLOCK) return blocks(of_blocks[h[0] - FIRST_BLOCK]);
                    if (h[0] >= FIRST_NORMED) {
                        return normed[h[0] - FIRST_NORMED](b[0], b[1], b[2], b[3], b[4], b[5], b[6], n[0], n[1], n[2], n[3],
                                                           n[4], f[5]);
                    }
                    if (h[0] >= FIRST_PRODUCT) return product(products[h[0] - FIRST_PRODUCT]);
                    decode[h[0]](b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], n[0], n[1],
                                 n[2], n[3], static_cast<unsigned>(f[4]), n[5], n[6], n[7], n[8], f[9]);
            }
        });
    });
}
