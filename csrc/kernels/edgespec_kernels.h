/* Verify kernels: what Python and the tests call. ggml itself comes in through ggml_backend_init.
 *
 * The library is a ggml plugin without a link to ggml: it looks up what it needs in the libraries
 * that are loaded already, and stays out (ggml_backend_init returns NULL) when they are not the ones
 * it knows. Everything below may be called before that.
 */
#ifndef EDGESPEC_KERNELS_H
#define EDGESPEC_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ES_API __attribute__((visibility("default")))

/* The instruction set in use: "avx512-vnni", "avx-vnni", "avx2", "neon-dotprod", "neon"; "" when this CPU
 * has none of them. */
ES_API const char *es_kernels_isa(void);

/* Choose another one, before the first model is loaded. 0, or -1: unknown, or this CPU lacks it. */
ES_API int es_kernels_set_isa(const char *name);

/* Why ggml_backend_init refused the ggml it found; "" if it did not. */
ES_API const char *es_kernels_refusal(void);

/* Whether weights of models loaded from now on are packed; on at start. */
ES_API void es_kernels_enable(int on);

struct es_packed {
    char name[64];
    char type[16];
    int64_t rows, columns;
    int64_t bytes; /* packed */
};

/* Tensors packed since the process began, and the i-th of them: 0, or -1 if there is none. */
ES_API int64_t es_kernels_n_packed(void);
ES_API int es_kernels_packed(int64_t i, struct es_packed *out);

/* ---- the kernels without ggml, for tests; -1 for arguments they cannot take, else 0 ---- */

/* Pack `rows` x `columns` weights of ggml's type and turn them back into the same bytes. */
ES_API int es_kernels_repack(int type, int64_t rows, int64_t columns, const uint8_t *weights, size_t size,
                             uint8_t *out);

/* y[n][rows] = x[n][columns] * weights^T on n_threads threads. */
ES_API int es_kernels_matmul(int type, int64_t rows, int64_t columns, const uint8_t *weights, size_t size, int64_t n,
                             const float *x, float *y, int n_threads);

/* Attention of n tokens, float32 q[n][n_head][head_dim], over n_kv cached ones, F16 k, v[n_kv][n_head_kv][head_dim];
 * F16 mask[n][n_kv] is added to the scores; out[n][n_head][head_dim]. */
ES_API int es_kernels_attention(int64_t head_dim, int64_t n_head, int64_t n_head_kv, int64_t n, int64_t n_kv,
                                const float *q, const uint16_t *k, const uint16_t *v, const uint16_t *mask,
                                float scale, float *out, int n_threads);

#ifdef __cplusplus
}
#endif

#endif
