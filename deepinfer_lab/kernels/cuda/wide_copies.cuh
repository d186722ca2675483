// How operands come to the blocks of wide.cuh, of which this is a part.
#pragma once

// Units of a stretch that a team has.
template <class C>
__device__ __forceinline__ int team_units(const Stretch& part, int team) {
    return max(part.count - team + C::TEAMS - 1, 0) / C::TEAMS;
}

// A unit of a warp's tile in its registers. scale: of outputs g and g + 8 in each quarter.
template <class C>
struct Piece {
    typename C::Words words;
    unsigned scale[QUARTERS];
};

// A warp's units, copied ahead in order, from one stretch to the next: DEPTH - 1 of them, each a group of copies.
template <class C>
struct Weights {
    char* ring;
    int team, tile;           // the warp's, of the block's
    int index = 0, left = 0;  // the next stretch; units of the one at hand
    int place = 0;            // in the ring, of the next copy
    unsigned at;              // the next unit, of all tiles

    __device__ __forceinline__ Weights(const Block<C>& block, const Operands& of, int warp)
        : ring(block.weights(warp)), team(warp / C::TILES), tile(warp % C::TILES) {}
    // The next stretch, if there is one. Where the output ends before a warp's tile it copies the last one, for nobody.
    __device__ __forceinline__ void begin(const Block<C>& block) {
        if (index == block.stretches()) return;
        const Stretch part = block.stretch(index++);
        const int own = min(block.first_tile(part) + tile, block.count - 1);
        left = team_units<C>(part, team);
        at = own * block.units + part.begin + team;
    }
    // Orders the copy of the next unit, if there is one.
    __device__ __forceinline__ void fetch(const Block<C>& block, const Operands& of) {
        if (left == 0) begin(block);
        if (left > 0) {
            const int lane = threadIdx.x % 32, scale_bytes = 16 << 8 - of.group_shift;
            char* const to = ring + place * C::UNIT + lane * 16;
            const char* const from = of.tiles + static_cast<size_t>(at) * C::Words::BYTES + lane * 16;
            copy_async(to, from, true);
            if (512 + lane * 16 < C::Words::BYTES) copy_async(to + 512, from + 512, true);
            const char* const scales = of.scales + static_cast<size_t>(at) * scale_bytes + lane * 16;
            copy_async_where(to + C::Words::BYTES, scales, lane * 16 < scale_bytes);
            at += C::TEAMS, --left;
        }
        commit_copies();
        if (++place == C::DEPTH) place = 0;
    }
    // The oldest unit that has been copied, or nothing of use where there is none. Its place is free then.
    __device__ __forceinline__ void take(const Block<C>& block, const Operands& of, Piece<C>& piece) {
        const int lane = threadIdx.x % 32;
        wait_copies<C::DEPTH - 2>();
        __syncwarp();  // all lanes' copies are there; and all have read the unit before, in whose place the next one goes
        fetch(block, of);
        const char* const unit = ring + place * C::UNIT;  // of DEPTH - 1 in flight, the place after the newest has the oldest
        piece.words.load(unit, lane);
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; ++quarter) {
            const char* const scales = unit + C::Words::BYTES + (quarter * 32 >> of.group_shift) * 32;
            piece.scale[quarter] = reinterpret_cast<const unsigned*>(scales)[lane / 4];
        }
    }
};

// By one thread of the copiers.
template <class C>
__device__ __forceinline__ void start_barriers(const Block<C>& block) {
    if (threadIdx.x != C::MULTIPLIERS) return;
    for (int slot = 0; slot < C::STAGES; ++slot) {
        start(block.full(slot), C::TOGETHER * 32);
        start(block.empty(slot), C::TEAM / 32);
    }
}

// A copier: TOGETHER warps fill a slot, others the next. A lane copies a word of a row's half, 64 of k, at a time, and puts it in
// its place: so pairs are transposed on their way, and no register holds them.
template <class C>
__device__ __forceinline__ void copy_rows(const Block<C>& block, const Operands& of, int warp) {
    const int lane = threadIdx.x % 32, chunk = lane / 16 * 4 + lane % 4, word = lane % 16 / 4;
    const int which = warp / C::TOGETHER, first_row = warp % C::TOGETHER * 8;
    start_barriers(block);
    __syncthreads();
    if (which >= C::FILLED) return;
    await_previous();
    Turn<C::STAGES> turn(0);
    turn.advance(which);
    const size_t row = static_cast<size_t>(of.k) * 2;
    const int stretches = block.stretches();
    int unit = which;
    for (int index = 0; index < stretches; ++index) {
        const Stretch part = block.stretch(index);
        const int first = block.first_row(part), rows = min(of.m - first, C::ROWS) - first_row;
        for (; unit < part.count; unit += C::FILLED) {
            const int at = (part.begin + unit) * MMA_K + 2 * lane;  // of K
            const bool there[2] = {at < of.k, at + 64 < of.k};
            const char* from = of.x + (first + first_row) * row + at * 2;
            char* to = block.slot(turn.slot) + first_row * ROW_BYTES + 4 * word;
            const auto copy_row = [&](int i) {
                char* const own = to + i * ROW_BYTES + (chunk ^ i) * 16;
                copy_word(own, from, there[0]), copy_word(own + C::HALF, from + ROW_BYTES, there[1]);
                from = settled(from + row);
            };
            await_or_trap(block.empty(turn.slot), turn.parity ^ 1);
            int left = rows;
#pragma unroll 1
            for (; left >= 8; left -= 8 * C::TOGETHER) {
#pragma unroll
                for (int i = 0; i < 8; ++i) copy_row(i);
                from += (C::TOGETHER - 1) * 8 * row, to += C::TOGETHER * 8 * ROW_BYTES;
            }
#pragma unroll 1
            for (int i = 0; i < left; ++i) copy_row(i);
            commit_copies();
            wait_copies<0>();
            publish_stores();
            arrive(block.full(turn.slot));
            turn.advance(C::FILLED);
        }
        unit -= part.count;
    }
}
