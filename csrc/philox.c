#include "philox.h"

#define MULTIPLIER_0 UINT64_C(0xD2E7470EE14C6C93)
#define MULTIPLIER_1 UINT64_C(0xCA5A826395121157)
#define WEYL_0 UINT64_C(0x9E3779B97F4A7C15)
#define WEYL_1 UINT64_C(0xBB67AE8584CAA73B)

/* 64 x 64 -> 128 bits in 32-bit halves: 32-bit boards have no 128-bit integer. */
static uint64_t multiply_high(uint64_t a, uint64_t b) {
    const uint64_t a_low = (uint32_t)a, a_high = a >> 32, b_low = (uint32_t)b, b_high = b >> 32;
    const uint64_t low = a_low * b_low, cross = a_high * b_low + (low >> 32);
    const uint64_t middle = (uint32_t)cross + a_low * b_high;
    return a_high * b_high + (cross >> 32) + (middle >> 32);
}

void es_philox_block(const uint64_t counter[4], const uint64_t key[2], uint64_t out[4]) {
    uint64_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint64_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t high0 = multiply_high(MULTIPLIER_0, c0), low0 = MULTIPLIER_0 * c0;
        const uint64_t high1 = multiply_high(MULTIPLIER_1, c2), low1 = MULTIPLIER_1 * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += WEYL_0;
        k1 += WEYL_1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

static double unit(uint64_t bits) { return (double)(bits >> 11) * 0x1.0p-53; }

void es_coins(uint64_t seed, uint64_t first, double *coins, size_t n) {
    const uint64_t key[2] = {seed, 0};
    uint64_t block[4];
    for (size_t i = 0; i < n; i++) {
        const uint64_t index = first + i;
        if (i == 0 || index % 4 == 0) {
            const uint64_t counter[4] = {index / 4, 0, 0, 0};
            es_philox_block(counter, key, block);
        }
        coins[i] = unit(block[index % 4]);
    }
}

double es_position_coin(uint64_t seed, uint64_t position) {
    const uint64_t key[2] = {seed, 1}, counter[4] = {position, 0, 0, 0};
    uint64_t block[4];
    es_philox_block(counter, key, block);
    return unit(block[0]);
}
