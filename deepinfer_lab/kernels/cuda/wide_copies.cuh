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
    int team, tile, index = 0, left;  // the next stretch; units of the one at hand
    int newest = 0, oldest = 0;       // places in the ring
    unsigned at;                      // the next unit, of all tiles
    bool there;                       // the output does not end before this tile

    __device__ __forceinline__ Weights(const Block<C>& block, const Operands& of, int warp)
        : ring(block.weights(warp)), team(warp / C::TILES), tile(warp % C::TILES) {
        begin(block);
    }
    // The next stretch, if there is one.
    __device__ __forceinline__ void begin(const Block<C>& block) {
        left = 0;
        if (index == block.stretches()) return;
        const Stretch part = block.stretch(index++);
        const int own = block.first_tile(part) + tile;
        left = team_units<C>(part, team), there = own < block.count;
        at = own * block.units + part.begin + team;
    }
    // Orders the copy of the next unit, if there is one.
    __device__ __forceinline__ void fetch(const Block<C>& block, const Operands& of) {
        if (left > 0) {
            const int lane = threadIdx.x % 32, scale_bytes = 16 << 8 - of.group_shift;
            if (there) {
                char* const to = ring + newest * C::UNIT + lane * 16;
                const char* const from = of.tiles + static_cast<size_t>(at) * C::Words::BYTES + lane * 16;
                copy_async(to, from, true);
                if (512 + lane * 16 < C::Words::BYTES) copy_async(to + 512, from + 512, true);
                if (lane * 16 < scale_bytes) {
                    copy_async(to + C::Words::BYTES, of.scales + static_cast<size_t>(at) * scale_bytes + lane * 16, true);
                }
            }
            at += C::TEAMS;
            if (--left == 0) begin(block);
        }
        commit_copies();
        if (++newest == C::DEPTH) newest = 0;
    }
    // The oldest unit that has been copied, or nothing of use where there is none. Its place is free then.
    __device__ __forceinline__ void take(const Block<C>& block, const Operands& of, Piece<C>& piece) {
        const int lane = threadIdx.x % 32;
        wait_copies<C::DEPTH - 2>();
        __syncwarp();  // all lanes' copies are there; and all have read the unit before, in whose place the next one goes
        fetch(block, of);
        const char* const unit = ring + oldest * C::UNIT;
        piece.words.load(unit, lane);
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; ++quarter) {
            const char* const scales = unit + C::Words::BYTES + (quarter * 32 >> of.group_shift) * 32;
            piece.scale[quarter] = reinterpret_cast<const unsigned*>(scales)[lane / 4];
        }
        if (++oldest == C::DEPTH) oldest = 0;
    }
};

// One thread copies all activations.
template <class C>
__device__ __forceinline__ void copy_rows(const Block<C>& block, const Operands& of) {
    const int rows = padded_rows(of.m), stretches = block.stretches();
    const size_t half = static_cast<size_t>(rows) * ROW_BYTES;
    Turn<C::STAGES> turn(0);
    for (int index = 0; index < stretches; ++index) {
        const Stretch part = block.stretch(index);
        const int first = block.first_row(part), bytes = min(rows - first, C::ROWS) * ROW_BYTES;
        const char* from = of.arranged + 2 * part.begin * half + first * ROW_BYTES;
        for (int left = part.count; left > 0; --left) {
            await(block.empty(turn.slot), turn.parity ^ 1);
            PhaseBarrier* const full = block.full(turn.slot);
            char* const to = block.slot(turn.slot);
            arrive_expecting(full, 2 * bytes);
            copy_bulk(to, from, bytes, full);
            copy_bulk(to + C::HALF, from + half, bytes, full);
            from += 2 * half;
            turn.advance(1);
        }
    }
}
