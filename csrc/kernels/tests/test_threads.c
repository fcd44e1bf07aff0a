/* The kernels on several threads, for ThreadSanitizer: the same bits as on one; and with gaps as without. */
#include "../edgespec_kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 100, COLUMNS = 512, TOKENS = 20, HEADS = 6, HEAD_DIM = 64, CACHED = 700, MAX_THREADS = 4, F16 = 1 };

static uint32_t state = 1;
static uint32_t next(void) { return state = state * 1664525u + 1013904223u; }
static float uniform(void) { return (float)(next() >> 8) / (1 << 23) - 1; }
static void check(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

static void test_matmul(int type, size_t block_bytes, int block) {
    const size_t size = ROWS * (COLUMNS / block) * block_bytes;
    uint8_t *weights = malloc(size);
    float *x = malloc(sizeof(float) * COLUMNS * TOKENS), *y = malloc(sizeof(float) * ROWS * TOKENS * 2);
    check(weights && x && y, "memory");
    for (size_t i = 0; i < size; i++) {
        weights[i] = (uint8_t)(next() >> 24) & 0x3F; /* scales are small and positive */
    }
    for (int i = 0; i < COLUMNS * TOKENS; i++) {
        x[i] = uniform();
    }
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        float *out = threads == 1 ? y : y + ROWS * TOKENS;
        check(!es_kernels_matmul(type, ROWS, COLUMNS, weights, size, TOKENS, x, out, threads), "matmul");
        check(!memcmp(y, out, sizeof(float) * ROWS * TOKENS), "the same product on all numbers of threads");
    }
    free(weights);
    free(x);
    free(y);
}

/* Experts of which some get all rows and some none; an expert that is not there is skipped. */
static void test_experts(int shared) {
    enum { EXPERTS = 5, USED = 3, INPUTS = COLUMNS * TOKENS * USED, OUTPUTS = ROWS * TOKENS * USED };
    const size_t size = (size_t)EXPERTS * ROWS * COLUMNS / 32 * 18; /* Q4_0 */
    uint8_t *weights = malloc(size);
    float *x = malloc(sizeof(float) * INPUTS), *y = calloc(OUTPUTS * 2, sizeof(float));
    int32_t ids[TOKENS * USED];
    check(weights && x && y, "memory");
    for (size_t i = 0; i < size; i++) {
        weights[i] = (uint8_t)(next() >> 24) & 0x3F;
    }
    for (int i = 0; i < INPUTS; i++) {
        x[i] = uniform();
    }
    for (int i = 0; i < TOKENS * USED; i++) {
        ids[i] = i % USED == 0 ? 4 : (int32_t)(next() >> 24) % 2;
    }
    ids[7] = EXPERTS;
    ids[8] = -1;
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        float *out = threads == 1 ? y : y + OUTPUTS;
        check(!es_kernels_experts(2, EXPERTS, ROWS, COLUMNS, weights, size, TOKENS, USED, ids, shared, x, out, threads),
              "experts");
        check(!memcmp(y, out, sizeof(float) * OUTPUTS), "the same experts on all numbers of threads");
    }
    free(weights);
    free(x);
    free(y);
}

/* States whose rows are shared out. All inputs are taken from the same numbers. */
static void test_states(void) {
    enum { WIDTH = 64, SLOTS = 3, SIZE = TOKENS * HEADS * WIDTH, OUT = SIZE + SLOTS * HEADS * WIDTH * WIDTH };
    float *x = malloc(sizeof(float) * HEADS * WIDTH * WIDTH), *out = calloc(OUT * 4, sizeof(float));
    check(x && out, "memory");
    for (int i = 0; i < HEADS * WIDTH * WIDTH; i++) {
        x[i] = -0.1f * (uniform() + 1);
    }
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        float *net_out = threads == 1 ? out : out + OUT, *scan_out = net_out + 2 * OUT;
        const struct es_delta_net net = {WIDTH, HEADS, 2, TOKENS, 1, SLOTS, 1, x, x, x, x, x, x};
        check(!es_kernels_delta_net(&net, net_out, threads), "delta net");
        check(!memcmp(out, net_out, sizeof(float) * OUT), "the same delta net on all numbers of threads");
        const struct es_state_scan scan = {WIDTH, WIDTH, HEADS, 2, TOKENS, 1, SLOTS, x, x, x, x, x, x};
        check(!es_kernels_state_scan(&scan, scan_out, threads), "state space");
        check(!memcmp(out + 2 * OUT, scan_out, sizeof(float) * OUT), "the same state space on all numbers of threads");
    }
    free(x);
    free(out);
}

/* With `branches` each token sees the first cells, and then every third of the rest as far as itself. */
static void test_attention(int tokens, int branches) {
    const int q_size = tokens * HEADS * HEAD_DIM, kv_size = CACHED * 2 * HEAD_DIM;
    float *q = malloc(sizeof(float) * q_size), *out = malloc(sizeof(float) * q_size * 2);
    uint16_t *kv = malloc(2 * kv_size), *mask = calloc((size_t)tokens * CACHED, 2);
    check(q && out && kv && mask, "memory");
    for (int i = 0; i < q_size; i++) {
        q[i] = uniform();
    }
    for (int i = 0; i < kv_size; i++) {
        kv[i] = (uint16_t)(0x3800 | (next() >> 22)); /* 0.5 to 1 */
    }
    for (int i = 0; branches && i < tokens * CACHED; i++) {
        const int token = i / CACHED, cell = i % CACHED - 230;
        mask[i] = cell < 0 || (cell % 3 == token % 3 && cell / 3 <= token * 2) ? 0 : 0xFC00;
    }
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        float *o = threads == 1 ? out : out + q_size;
        const struct es_attention a = {HEAD_DIM, HEAD_DIM, HEADS, 2, tokens, CACHED, q, kv, kv, mask, NULL, 0.125f, 0, F16};
        check(!es_kernels_attention(&a, o, threads), "attention");
        check(!memcmp(out, o, sizeof(float) * q_size), "the same attention on all numbers of threads");
    }
    free(q);
    free(out);
    free(kv);
    free(mask);
}

/* A token that sees n cells and then some of the rest gives the bits that it gives where they lie side by side. */
static void test_branch(int n) {
    enum { KV_ROW = 2 * HEAD_DIM };
    float q[HEADS * HEAD_DIM], out[2][HEADS * HEAD_DIM];
    uint16_t *kv = malloc(2 * CACHED * KV_ROW), *chain = malloc(2 * CACHED * KV_ROW), mask[CACHED];
    check(kv && chain, "memory");
    for (int i = 0; i < HEADS * HEAD_DIM; i++) {
        q[i] = uniform();
    }
    for (int i = 0; i < CACHED * KV_ROW; i++) {
        kv[i] = (uint16_t)(0x3800 | (next() >> 22));
    }
    int seen = 0;
    for (int cell = 0; cell < CACHED; cell++) {
        const int visible = cell < n || cell % 5 == 4;
        mask[cell] = visible ? 0 : 0xFC00;
        if (visible) {
            memcpy(chain + seen++ * KV_ROW, kv + cell * KV_ROW, 2 * KV_ROW);
        }
    }
    const struct es_attention gaps = {HEAD_DIM, HEAD_DIM, HEADS, 2, 1, CACHED, q, kv, kv, mask, NULL, 0.125f, 0, F16};
    check(!es_kernels_attention(&gaps, out[0], 2), "attention");
    memset(mask, 0, sizeof mask);
    const struct es_attention straight = {HEAD_DIM, HEAD_DIM, HEADS, 2,    1,      seen, q,
                                          chain,    chain,    mask,  NULL, 0.125f, 0,    F16};
    check(!es_kernels_attention(&straight, out[1], 2), "attention");
    check(!memcmp(out[0], out[1], sizeof out[0]), "the same attention with gaps and without");
    free(kv);
    free(chain);
}

/* Several products one after another, from a stream that ends among them. */
static void test_timing(void) {
    const struct es_shape shapes[] = {{12, 100, 512}, {14, 33, 256}, {2, 64, 64}};
    const struct es_prefetch prefetch = {2, 4096};
    struct es_stream *stream = es_kernels_stream_new(1 << 17);
    check(stream != NULL, "memory");
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        check(es_kernels_time_products(stream, shapes, 3, TOKENS, prefetch, threads) > 0, "timed products");
        check(es_kernels_time_read(stream, 1 << 17, prefetch, threads) > 0, "timed reading");
        check(es_kernels_peak(100, threads) > 0, "peak");
    }
    check(es_kernels_time_read(stream, 1 << 18, prefetch, 1) < 0, "a stream that is too short");
    es_kernels_stream_free(stream);
}

int main(void) {
    if (!*es_kernels_isa()) {
        puts("skipped: this CPU has no AVX2");
        return 0;
    }
    test_matmul(2, 18, 32);    /* Q4_0 */
    test_matmul(10, 84, 256);  /* Q2_K */
    test_matmul(11, 110, 256); /* Q3_K */
    test_matmul(12, 144, 256); /* Q4_K */
    test_matmul(14, 210, 256); /* Q6_K */
    test_matmul(23, 136, 256); /* IQ4_XS */
    test_matmul(34, 54, 256);  /* TQ1_0 */
    test_matmul(39, 17, 32);   /* MXFP4 */
    test_matmul(40, 36, 64);   /* NVFP4 */
    test_matmul(1, 64, 32);    /* F16 */
    test_matmul(30, 64, 32);   /* BF16 */
    test_experts(0);
    test_experts(1);
    test_states();
    for (int branches = 0; branches <= 1; branches++) {
        test_attention(1, branches);
        test_attention(60, branches);
    }
    for (int n = 1; n < CACHED; n += 3) {
        test_branch(n);
    }
    test_timing();
    return 0;
}
