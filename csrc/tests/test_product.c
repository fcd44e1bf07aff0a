/* Every compiled copy of the product against plain loops in double. */
#include "product.h"

#include "check.h"

static uint64_t state = 1;

static size_t levels(const es_product *found[3]) {
    size_t n = 0;
    found[n++] = &es_product_baseline;
#ifdef ES_HAVE_X86_LEVELS
    const es_product *best = es_product_best();
    if (best == &es_product_x86_64_v3 || best == &es_product_x86_64_v4) found[n++] = &es_product_x86_64_v3;
    if (best == &es_product_x86_64_v4) found[n++] = &es_product_x86_64_v4;
#endif
    return n;
}

/* A half-precision number, by its definition. */
static double half_of(unsigned bits) {
    const double sign = bits >> 15 ? -1.0 : 1.0, fraction = bits & 1023u;
    const int exponent = (int)(bits >> 10 & 31u);
    if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024.0 + fraction, exponent - 25) : ldexp(fraction, -24));
}

static void one_shape(const es_product *product, size_t n_rows, size_t n_columns, size_t n_vectors) {
    const size_t n_blocks = n_columns / ES_Q8_COLUMNS;
    uint8_t *matrix = exact(n_rows * n_blocks * ES_Q8_BYTES);
    float *vectors = exact(n_vectors * n_columns * sizeof *vectors), *out = exact(n_vectors * n_rows * sizeof *out);
    for (size_t i = 0; i < n_rows * n_blocks * ES_Q8_BYTES; i++) matrix[i] = (uint8_t)random_bits(&state);
    for (size_t i = 0; i < n_rows * n_blocks; i++) {
        const unsigned scale = (unsigned)(0x2000 + random_below(&state, 0x800)); /* about 0.01 */
        matrix[i * ES_Q8_BYTES] = (uint8_t)scale;
        matrix[i * ES_Q8_BYTES + 1] = (uint8_t)(scale >> 8);
    }
    for (size_t i = 0; i < n_vectors * n_columns; i++) vectors[i] = (float)random_normal(&state);
    product->multiply(matrix, n_rows, n_columns, vectors, n_vectors, out);
    for (size_t r = 0; r < n_rows; r++)
        for (size_t v = 0; v < n_vectors; v++) {
            double sum = 0, size = 0;
            for (size_t c = 0; c < n_columns; c++) {
                const uint8_t *block = matrix + (r * n_blocks + c / ES_Q8_COLUMNS) * ES_Q8_BYTES;
                const double weight = half_of(block[0] | (unsigned)block[1] << 8) *
                                      (int8_t)block[2 + c % ES_Q8_COLUMNS];
                sum += weight * (double)vectors[v * n_columns + c];
                size += fabs(weight * (double)vectors[v * n_columns + c]);
            }
            CHECK(fabs((double)out[v * n_rows + r] - sum) <= 1e-6 * size);
            float alone; /* what is computed beside it makes no difference */
            product->multiply(matrix + r * n_blocks * ES_Q8_BYTES, 1, n_columns, vectors + v * n_columns, 1, &alone);
            CHECK(alone == out[v * n_rows + r]);
        }
    free(matrix);
    free(vectors);
    free(out);
}

/* All scales, also those that are not finite. */
static void every_scale(const es_product *product) {
    uint8_t block[ES_Q8_BYTES] = {0};
    float x[ES_Q8_COLUMNS] = {0}, out;
    block[2] = 1;
    x[0] = 1.0f;
    for (unsigned bits = 0; bits < 1u << 16; bits++) {
        block[0] = (uint8_t)bits;
        block[1] = (uint8_t)(bits >> 8);
        product->multiply(block, 1, ES_Q8_COLUMNS, x, 1, &out);
        if (isfinite(half_of(bits))) CHECK((double)out == half_of(bits));
        else CHECK(!isfinite(out)); /* infinity times the 0 of the other columns is not a number */
    }
}

int main(void) {
    const es_product *found[3];
    const size_t n = levels(found);
    for (size_t i = 0; i < n; i++) {
        every_scale(found[i]);
        for (size_t n_rows = 1; n_rows <= 5; n_rows++)
            for (size_t blocks = 0; blocks <= 7; blocks++)
                for (size_t n_vectors = 0; n_vectors <= 6; n_vectors++)
                    one_shape(found[i], n_rows, blocks * ES_Q8_COLUMNS, n_vectors);
    }
    return 0;
}
