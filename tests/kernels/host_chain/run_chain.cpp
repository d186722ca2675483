// The kernels that take a whole decode step, in one CPU program. As run_ops.cpp, but all blocks run at once, and the second
// buffer has numbers of further buffers, from 1 on, where the kernel finds their addresses; 0 stays null.
//
// Request: 8 ints (kernel, blocks, threads, arguments among the buffers, buffers, numbers, bytes of shared memory, a seed of
// the blocks' order or 0); buffers and numbers as in requests.h. Answer: all buffers but the second, as the kernel left them.
#include "decode_chain_w4_w4.cu"
#include "decode_chain_w4_w3.cu"
#include "decode_chain_w3_w3.cu"
#include "host_grid.h"
#include "requests.h"

int main() {
    const decltype(&decode_chain_w4_w4) kernels[] = {decode_chain_w4_w4, decode_chain_w4_w3, decode_chain_w3_w3};
    const auto run = [&](const int* h, std::vector<Buffer>& b, const std::vector<double>& n) {
        long long* const table = b[1];
        for (int i = 0; i < b[1].bytes / 8; ++i) {
            if (table[i]) table[i] = reinterpret_cast<long long>(b[h[3] + table[i] - 1].data.get());
        }
        launch_together({h[1]}, h[2], h[6], h[7], [&] {
            kernels[h[0]](b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], n[0], n[1], n[2],
                          n[3], n[4], n[5], static_cast<unsigned>(n[6]), n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14],
                          n[15]);
        });
    };
    serve(run, 1);
}
