// The kernels of wide.cuh in one CPU program (requests.h, where grid_y is the number of blocks of a cluster). Kernel 0 arranges
// rows.
#include "arrange_rows.cu"
#include "requests.h"
#include "wide.cuh"

// The order of CUTS in wide_products.py.
template <class Words>
struct Cuts {
    using A = WideCut<Words, 2, 1, 32, 5, 3, 4, false>;
    using B = WideCut<Words, 1, 1, 128, 2, 4, 2, true>;
    using C = WideCut<Words, 1, 2, 32, 6, 3, 4, false>;
};

int main() {
    serve([&](const int* h, const std::vector<Buffer>& b, const std::vector<double>& f) {
        const std::vector<int> n(f.begin(), f.end());
        const auto wide = [&](auto cut) {
            if (decltype(cut)::THREADS != h[3] || decltype(cut)::SHARED != h[6]) complain("not as Python has it");
            wide_block<decltype(cut)>(b[0], b[1], b[2], b[3], b[4], n[0], n[1], n[2], n[3]);
        };
        launch_clusters(h[1], h[2], h[3], h[6], h[7], [&] {
            switch (h[0]) {
                case 0: return arrange_rows(b[0], b[1], n[0], n[1]);
                case 1: return wide(Cuts<W4Words>::A{});
                case 2: return wide(Cuts<W4Words>::B{});
                case 3: return wide(Cuts<W4Words>::C{});
                case 4: return wide(Cuts<W3Words>::A{});
                case 5: return wide(Cuts<W3Words>::B{});
                case 6: return wide(Cuts<W3Words>::C{});
            }
        });
    });
}
