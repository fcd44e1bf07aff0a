/* Every compiled copy of the row kernels against plain loops in double. */
#include "rows.h"

#include "check.h"

static uint64_t state = 1;

static size_t levels(const es_rows *found[3]) {
    size_t n = 0;
    found[n++] = &es_rows_baseline;
#ifdef ES_HAVE_X86_LEVELS
    const es_rows *best = es_rows_best();
    if (best == &es_rows_x86_64_v3 || best == &es_rows_x86_64_v4) found[n++] = &es_rows_x86_64_v3;
    if (best == &es_rows_x86_64_v4) found[n++] = &es_rows_x86_64_v4;
#endif
    return n;
}

/* n floats at `offset` floats from the allocation, ending where it ends. */
typedef struct buffer {
    float *memory, *at;
} buffer;

static buffer floats(size_t n, size_t offset) {
    float *memory = exact((offset + n) * sizeof *memory);
    return (buffer){memory, memory + offset};
}

static void near(double got, double want, double relative) {
    CHECK(fabs(got - want) <= relative * fabs(want) + 1e-30);
}

static void one_length(const es_rows *rows, size_t n, size_t offset, size_t kind) {
    const buffer row = floats(n, offset), p = floats(n, (offset + 3) % 16), q = floats(n, (offset + 7) % 16),
                 out = floats(n, (offset + 11) % 16);
    const size_t n_blocks = es_n_blocks(n);
    float *block_max = exact(n_blocks * sizeof *block_max);
    double *block_sum = exact(n_blocks * sizeof *block_sum);
    fill_row(&state, kind, row.at, n);

    float max = -INFINITY;
    CHECK(rows->block_max(row.at, n, block_max));
    for (size_t b = 0; b < n_blocks; b++) {
        float want = -INFINITY;
        for (size_t i = b * ES_BLOCK_LEN; i < n && i < (b + 1) * ES_BLOCK_LEN; i++)
            want = row.at[i] > want ? row.at[i] : want;
        CHECK(block_max[b] == want);
        max = want > max ? want : max;
    }

    /* exp_sum, exp_write and scale */
    double total = 0;
    for (size_t i = 0; i < n; i++) total += exp((double)row.at[i] - (double)max);
    near(rows->exp_sum(row.at, n, max), total, 2e-6);

    const float scale = 1.25f, factor = 0.37f;
    total = rows->exp_write(row.at, n, max, scale, out.at, block_sum);
    for (int scaled = 0; scaled < 2; scaled++) {
        double all = 0;
        for (size_t b = 0; b < n_blocks; b++) {
            double sum = 0;
            for (size_t i = b * ES_BLOCK_LEN; i < n && i < (b + 1) * ES_BLOCK_LEN; i++) {
                const double x = ((double)row.at[i] - (double)max) * (double)scale;
                const double want = exp(x) * (scaled ? (double)factor : 1.0);
                /* the argument's own float rounding grows with |x| */
                CHECK(fabs((double)out.at[i] - want) <= want * (3e-7 + 1.2e-7 * fmin(fabs(x), 100.0)) + 1.7e-38); /* exp(-87) */
                sum += (double)out.at[i];
            }
            near(block_sum[b], sum, 2e-6);
            all += block_sum[b];
        }
        near(total * (scaled ? (double)factor : 1.0), all, 1e-6);
        rows->scale(out.at, n, block_sum, factor);
    }

    /* residual */
    for (size_t i = 0; i < n; i++) {
        p.at[i] = (float)(random_unit(&state) / (double)n);
        q.at[i] = random_bits(&state) % 3 ? (float)(random_unit(&state) / (double)n) : 0.0f;
    }
    const float weight = 0.8f;
    const double left = rows->residual(p.at, q.at, n, weight, out.at, block_sum);
    double all = 0;
    for (size_t i = 0; i < n; i++) {
        const double want = fmax(0.0, (double)weight * (double)p.at[i] - (double)q.at[i]);
        CHECK(out.at[i] >= 0.0f && fabs((double)out.at[i] - want) <= 1.2e-7 * (double)(p.at[i] + q.at[i]));
        all += (double)out.at[i];
    }
    near(left, all, 2e-6);

    free(row.memory);
    free(p.memory);
    free(q.memory);
    free(out.memory);
    free(block_max);
    free(block_sum);
}

/* A NaN is seen at every place; infinities are numbers. */
static void not_a_number(const es_rows *rows) {
    float block_max[3];
    for (size_t n = 1; n <= 300; n += n < 20 ? 1 : 47) {
        float *row = exact(n * sizeof *row);
        for (size_t i = 0; i < n; i++) row[i] = -INFINITY;
        CHECK(rows->block_max(row, n, block_max));
        CHECK(block_max[0] == -INFINITY && block_max[es_n_blocks(n) - 1] == -INFINITY);
        for (size_t i = 0; i < n; i++) {
            row[i] = i % 2 ? NAN : -NAN;
            CHECK(!rows->block_max(row, n, block_max));
            row[i] = INFINITY;
            CHECK(rows->block_max(row, n, block_max));
            CHECK(block_max[i / ES_BLOCK_LEN] == INFINITY);
            row[i] = -INFINITY;
        }
        free(row);
    }
}

/* exp over its whole range: 1 at 0, within 3e-7 down to -87, 0 below. */
static void whole_range_of_exp(const es_rows *rows) {
    enum { N = ES_BLOCK_LEN * 800 };
    float *x = exact(N * sizeof *x), *e = exact(N * sizeof *e);
    double *block_sum = exact(es_n_blocks(N) * sizeof *block_sum);
    for (size_t i = 0; i < N; i++) x[i] = -(float)i * (100.0f / N);
    rows->exp_write(x, N, 0.0f, 1.0f, e, block_sum);
    CHECK(e[0] == 1.0f);
    for (size_t i = 0; i < N; i++) {
        const double want = x[i] < -87.0f ? 0.0 : exp((double)x[i]);
        CHECK(fabs((double)e[i] - want) <= 3e-7 * want);
    }
    free(x);
    free(e);
    free(block_sum);
}

int main(void) {
    const es_rows *found[3];
    const size_t n_levels = levels(found);
    for (size_t l = 0; l < n_levels; l++) {
        printf("%s\n", found[l]->name);
        for (size_t n = 1; n <= 400; n++)
            for (size_t kind = 0; kind < N_ROW_KINDS; kind++) one_length(found[l], n, (n + kind) % 16, kind);
        for (size_t kind = 0; kind < N_ROW_KINDS; kind++) one_length(found[l], 151936, 1 + kind, kind);
        not_a_number(found[l]);
        whole_range_of_exp(found[l]);
    }
    return 0;
}
