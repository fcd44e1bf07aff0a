// The two limits of a product, to be timed: how fast weights can be read, and multiplied once they are in registers.
#pragma once

int32_t read_bytes(const uint8_t *p, int64_t bytes, const Prefetch &ahead) {
    constexpr int AT_ONCE = 8; // vectors
    I all[AT_ONCE];
    for (I &x : all) {
        x = i_zero();
    }
    for (const uint8_t *end = p + bytes; p < end; p += sizeof all) {
        if (ahead.level == 1) {
            prefetch<1>(p + ahead.bytes, sizeof all);
        } else {
            prefetch<2>(p + ahead.bytes, sizeof all);
        }
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; i++) {
            all[i] = i_xor(all[i], i_load(p + i * sizeof(I)));
        }
    }
    int32_t folded = 0;
    for (I &x : all) {
        int32_t lanes[LANES];
        __builtin_memcpy(lanes, &x, sizeof x);
        for (const int32_t lane : lanes) {
            folded ^= lane;
        }
    }
    return folded;
}

int64_t peak(int64_t rounds) {
    constexpr int SUMS = 16; // a product waits for the one before it into the same sum: others fill that time
    I sum[SUMS], w[4], a = i_bytes(1);
    for (I &x : sum) {
        x = i_zero();
    }
    for (int i = 0; i < 4; i++) {
        w[i] = i_bytes(i);
        i_forget(w[i]); // else the compiler would leave out products with what it knows
    }
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 16
        for (int s = 0; s < SUMS; s++) {
            i_forget(a); // else its products with the weights would be computed once
            sum[s] = i_dot_registers(sum[s], w, a);
        }
    }
    for (I &x : sum) {
        i_forget(x); // else nothing at all would be computed
    }
    return rounds * SUMS * 4 * (PAIRED ? 8 : 4) * LANES;
}
