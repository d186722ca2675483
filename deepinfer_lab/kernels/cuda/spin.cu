// Occupies multiprocessors for a given time and counts the blocks that ran on each: a control for measurements of overlap, and
// the proof of which multiprocessors a stream has.
extern "C" __global__ void spin(unsigned* __restrict__ blocks_on, long long nanoseconds) {
    unsigned multiprocessor;
    unsigned long long begin, now;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
    if (threadIdx.x == 0) atomicAdd(&blocks_on[multiprocessor], 1u);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < static_cast<unsigned long long>(nanoseconds));
}
