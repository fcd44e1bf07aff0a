// Activations as the products take them: see record_bytes() in isa.h.
#pragma once

// Where the int8 of step s of a tile begin, and its numbers.
inline int8_t *bytes_of(int8_t *tile, int nc, int64_t s) {
    return nc > MAX_TILE ? wide_bytes(tile, nc, s) : tile + s * record_bytes(BYTES_32, nc);
}
inline int8_t *numbers_of(int8_t *tile, int nc, int64_t s) {
    return nc > MAX_TILE ? wide_numbers(tile, nc, s) : bytes_of(tile, nc, s) + 32 * nc;
}

// What goes with the 32 int8 of step s of column c: see isa.h. `sums`: of their halves.
inline void put_sums(int8_t *tile, int nc, int c, int64_t s, int act_block, float d, const ByteSums *sums) {
    const bool is_odd = s % 2;
    int8_t *const meta = numbers_of(tile, nc, s) + 4 * c, *const even = numbers_of(tile, nc, s - is_odd) + 4 * c;
    int8_t *const odd = numbers_of(tile, nc, s | 1) + 4 * c;
    const int32_t all = -(sums[0].all() + sums[1].all()), factor = act_block == 32 ? 8 : 32;
    const int32_t starts[2] = {sums[0].start(factor), sums[1].start(factor)};
    if (act_block == 32) {
        const float scaled = d * (float)all;
        const int32_t start = ByteSums{sums[0].first + sums[1].first, sums[0].second + sums[1].second}.start(factor);
        __builtin_memcpy(meta, &d, 4);
        __builtin_memcpy(meta + 4 * nc, &start, 4);
        __builtin_memcpy(meta + 8 * nc, &scaled, 4);
        __builtin_memcpy(meta + 12 * nc, &starts[0], 4);
        return;
    }
    const int16_t halves[2] = {(int16_t)-sums[0].all(), (int16_t)-sums[1].all()}, whole = (int16_t)all;
    if (is_odd) {
        __builtin_memcpy(odd, halves, 4);
    } else {
        __builtin_memcpy(even, &d, 4);
        __builtin_memcpy(odd + 12 * nc, halves, 4);
    }
    __builtin_memcpy(even + 12 * nc + 2 * is_odd, &whole, 2);
    __builtin_memcpy(meta + 4 * nc, &starts[0], 4);
    __builtin_memcpy(meta + 8 * nc, &starts[1], 4);
}

void quantize_bytes(const float *x, int64_t columns, Acts acts, int64_t block0, int64_t block1, int8_t *tile, int nc,
                    int c) {
    const int act_block = act_columns(acts);
    for (int64_t b = block0; b < block1; b++) {
        const int64_t first = b * act_block, n = columns - first < act_block ? columns - first : act_block;
        F largest[2] = {f_zero(), f_zero()}; // two, as each waits for the one before it
        for (int64_t i = 0; i < n; i += 2 * LANES) {
            largest[0] = f_max(largest[0], f_abs(f_load(x + first + i)));
            largest[1] = f_max(largest[1], f_abs(f_load(x + first + i + LANES)));
        }
        const float max = f_reduce_max(f_max(largest[0], largest[1])), d = max / 127, inverse = max > 1e-30f ? 127 / max : 0;
        for (int64_t i = 0; i < n; i += 32) {
            int8_t *const bytes = bytes_of(tile, nc, (first + i) / 32);
            ByteSums sums[2] = {};
            for (int j = 0; j < 32; j += LANES) {
                const F v = f_mul(f_load(x + first + i + j), f_set1(inverse));
                i_store_bytes(bytes + act_place(nc, c, j), v, sums[j / 16]);
            }
            put_sums(tile, nc, c, (first + i) / 32, act_block, d, sums);
        }
    }
    if (block1 * act_block >= columns && columns / 32 % 2) { // the last packet's second step is not there
        for (int j = 0; j < 32; j += 8) {
            __builtin_memset(bytes_of(tile, nc, columns / 32) + act_place(nc, c, j), 0, 8);
        }
        for (int k = 0; k < 4; k++) {
            __builtin_memset(numbers_of(tile, nc, columns / 32) + 4 * c + 4 * nc * k, 0, 4);
        }
    }
}

// To the nearest BF16, as a float.
inline float round_to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    bits = x == x ? (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000 : bits;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// Steps [first, last) of x into column c of a tile of nc.
void put_floats(const float *x, bool rounded, int64_t first, int64_t last, int8_t *tile, int nc, int c) {
    for (int64_t s = first; s < last; s++) {
        float step[32];
        for (int i = 0; i < 32; i++) {
            step[i] = rounded ? round_to_bf16(x[32 * s + i]) : x[32 * s + i];
        }
        __builtin_memcpy(tile + 128 * (s * nc + c), step, sizeof step);
    }
}

#ifdef ES_ISA_BF16
void put_pairs(const float *x, int64_t first, int64_t last, int8_t *tile, int nc, int c) {
    for (int64_t s = first; s < last; s++) {
        uint32_t step[16];
        for (int i = 0; i < 16; i++) {
            const float pair[2] = {round_to_bf16(x[32 * s + 2 * i]), round_to_bf16(x[32 * s + 2 * i + 1])};
            uint32_t bits[2];
            __builtin_memcpy(bits, pair, sizeof bits);
            step[i] = bits[0] >> 16 | bits[1];
        }
        __builtin_memcpy(tile + 128 * s * nc + 64 * c, step, sizeof step);
    }
}
#endif

template <bool PAIRS>
void quantize(const float *x, int64_t columns, Acts acts, int64_t block0, int64_t block1, int8_t *tile, int nc, int c) {
    if (acts == BYTES_32 || acts == BYTES_256) {
        quantize_bytes(x, columns, acts, block0, block1, tile, nc, c);
        return;
    }
#ifdef ES_ISA_BF16
    if (PAIRS && acts == ROUNDED_FLOATS) {
        put_pairs(x, block0, block1, tile, nc, c);
        return;
    }
#endif
    put_floats(x, acts == ROUNDED_FLOATS, block0, block1, tile, nc, c);
}
