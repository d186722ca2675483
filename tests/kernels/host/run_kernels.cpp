// All kernels in one CPU program. Requests come from standard input and answers go to standard output, both binary, until the
// input ends. Buffers are heap blocks of exactly the right size, so that an address sanitizer catches any access past them.
//
// Request: 12 ints (kernel, grid_x, grid_y, threads, m, n, k, group, has_bias, splits of K, units, reserved), then x, packed, scales, bias if any.
// Answer:  out, fp16 [m, n].  Kernels 100 and 101 answer instead with shared_b after thread `m` alone unpacked at (0, 0).
// Kernels 102 and 103 take no x and dequantise `units` eights of values: they answer with fp16 [n, k].
#include <cstdio>
#include <cstdlib>

#include "w3_dequantise.cu"
#include "w3_gemv.cu"
#include "w3_gemv_batch_tile.cu"
#include "w3_gemv_grid_y.cu"
#include "w3_gemv_warp_tile.cu"
#include "w3_tiled_gemm.cu"
#include "w3_tiled_gemm_split_k.cu"
#include "w4_dequantise.cu"
#include "w4_gemv.cu"
#include "w4_gemv_batch_tile.cu"
#include "w4_tiled_gemm.cu"
#include "w4_tiled_gemm_split_k.cu"

template <class T>
std::unique_ptr<T[]> read(size_t count) {
    auto data = std::make_unique<T[]>(count);
    if (std::fread(data.get(), sizeof(T), count, stdin) != count) std::exit(3);
    return data;
}

int main() {
    using Kernel = void (*)(const half_t*, const unsigned char*, const half_t*, const half_t*, half_t*, int, int, int, int);
    const Kernel kernels[] = {w4_gemv,        w3_gemv,           w4_gemv_batch_tile, w3_gemv_grid_y, w3_gemv_batch_tile,
                              w3_gemv_warp_tile, w4_tiled_gemm, w3_tiled_gemm};
    int h[12];
    while (std::fread(h, sizeof h, 1, stdin) == 1) {
        const int kernel = h[0], m = h[4], n = h[5], k = h[6], group = h[7];
        const int bits = kernel % 2 == 0 && kernel != 4 ? 4 : 3;
        const auto x = read<half_t>(kernel >= 100 ? 0 : static_cast<size_t>(m) * k);
        const auto packed = read<unsigned char>(static_cast<size_t>(n) * k * bits / 8);
        const auto scales = read<half_t>(static_cast<size_t>(n) * (k / group));
        if (kernel >= 102) {
            const size_t count = static_cast<size_t>(n) * k;
            const auto out = std::make_unique<half_t[]>(count);
            for (size_t i = 0; i < count; ++i) out[i] = 0x7FFF;
            launch({h[1]}, h[3], [&] {
                (kernel == 102 ? w4_dequantise : w3_dequantise)(packed.get(), scales.get(), out.get(), h[10], group);
            });
            std::fwrite(out.get(), sizeof(half_t), count, stdout);
        } else if (kernel >= 100) {
            half_t shared_b[BK][B_STRIDE];
            for (auto& row : shared_b)
                for (auto& cell : row) cell = 0x7FFF;
            threadIdx.x = m;
            const auto unpack = [&](auto weights) {
                weights.fetch(packed.get(), scales.get(), 0, 0, n, k, __ffs(group) - 1);
                weights.store(shared_b);
            };
            kernel == 100 ? unpack(UnpackW4()) : unpack(UnpackW3());
            std::fwrite(shared_b, sizeof shared_b, 1, stdout);
        } else {
            const auto bias = h[8] ? read<half_t>(n) : nullptr;
            const size_t count = static_cast<size_t>(m) * n;
            const auto out = std::make_unique<half_t[]>(count);
            for (size_t i = 0; i < count; ++i) out[i] = 0x7FFF;  // NaN: whatever is not written shows
            const dim3 grid = {h[1], h[2], h[9]};
            const int threads = h[3];
            if (kernel < 8) {
                launch(grid, threads, [&] {
                    kernels[kernel](x.get(), packed.get(), scales.get(), bias.get(), out.get(), m, n, k, group);
                });
            } else {
                const auto partial = std::make_unique<float[]>(count * grid.z);
                for (size_t i = 0; i < count * grid.z; ++i) partial[i] = NAN;
                launch(grid, threads, [&] {
                    const auto split = kernel == 8 ? w4_tiled_gemm_split_k : w3_tiled_gemm_split_k;
                    split(x.get(), packed.get(), scales.get(), nullptr, partial.get(), m, n, k, group);
                });
                launch({(n + threads - 1) / threads, m}, threads,
                       [&] { add_partials(partial.get(), bias.get(), out.get(), m, n, grid.z); });
            }
            std::fwrite(out.get(), sizeof(half_t), count, stdout);
        }
        std::fflush(stdout);
    }
}
