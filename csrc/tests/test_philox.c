/* Coins: the known answers of the generator's authors, and slices of one stream. */
#include "philox.h"

#include "check.h"

/* Random123's tests/kat_vectors, "philox4x64 10": counter, key, expected. */
static const uint64_t KNOWN[3][10] = {
    {0, 0, 0, 0, 0, 0, UINT64_C(0x16554d9eca36314c), UINT64_C(0xdb20fe9d672d0fdc), UINT64_C(0xd7e772cee186176b),
     UINT64_C(0x7e68b68aec7ba23b)},
    {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_C(0x87b092c3013fe90b),
     UINT64_C(0x438c3c67be8d0224), UINT64_C(0x9cc7d7c69cd777b6), UINT64_C(0xa09caebf594f0ba0)},
    {UINT64_C(0x243f6a8885a308d3), UINT64_C(0x13198a2e03707344), UINT64_C(0xa4093822299f31d0),
     UINT64_C(0x082efa98ec4e6c89), UINT64_C(0x452821e638d01377), UINT64_C(0xbe5466cf34e90c6c),
     UINT64_C(0xa528f45403e61d95), UINT64_C(0x38c72dbd566e9788), UINT64_C(0xa5a1610e72fd18b5),
     UINT64_C(0x57bd43b5e52b7fe6)},
};

static void known_answers(void) {
    for (size_t i = 0; i < 3; i++) {
        uint64_t out[4];
        es_philox_block(KNOWN[i], KNOWN[i] + 4, out);
        CHECK(memcmp(out, KNOWN[i] + 6, sizeof out) == 0);
    }
}

static void any_slice_equals_the_whole_stream(void) {
    enum { N = 64 };
    const uint64_t seeds[] = {0, 1, 20261121, UINT64_MAX}, starts[] = {0, 5, UINT64_MAX - 20};
    for (size_t s = 0; s < 4; s++)
        for (size_t o = 0; o < 3; o++) {
            double whole[N];
            es_coins(seeds[s], starts[o], whole, N);
            for (size_t begin = 0; begin <= N; begin++)
                for (size_t n = 0; n <= N - begin; n++) {
                    double *slice = exact(n * sizeof *slice);
                    es_coins(seeds[s], starts[o] + begin, slice, n);
                    CHECK(memcmp(slice, whole + begin, n * sizeof *slice) == 0);
                    free(slice);
                }
        }
}

static void coins_are_uniform(void) {
    enum { N = 1000000, BINS = 100 };
    double *coins = exact(N * sizeof *coins), statistic = 0;
    size_t counts[BINS] = {0};
    es_coins(7, 0, coins, N);
    for (size_t i = 0; i < N; i++) {
        CHECK(coins[i] >= 0.0 && coins[i] < 1.0);
        counts[(size_t)(coins[i] * BINS)]++;
    }
    for (size_t i = 0; i < BINS; i++) {
        const double expected = (double)N / BINS, off = (double)counts[i] - expected;
        statistic += off * off / expected;
    }
    CHECK(statistic < 148.2); /* chi-square, 99 degrees of freedom, p = 0.001 */
    free(coins);
}

int main(void) {
    known_answers();
    any_slice_equals_the_whole_stream();
    coins_are_uniform();
    return 0;
}
