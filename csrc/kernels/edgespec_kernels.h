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

/* The instruction set in use: "amx-int8", "avx512-bf16", "avx512-vnni", "avx-vnni", "avx2", "neon-i8mm",
 * "neon-dotprod", "neon"; "" when this CPU has none of them. */
ES_API const char *es_kernels_isa(void);

/* Choose another one, before the first model is loaded. 0, or -1: unknown, or this CPU lacks it. */
ES_API int es_kernels_set_isa(const char *name);

/* How weights are fetched ahead of their use: by `bytes`, into `level` 1 of the caches (past the others) or 2. Results
 * do not depend on it. */
struct es_prefetch {
    int32_t level;
    int64_t bytes;
};

/* What contexts made from now on use; a default at start. */
ES_API struct es_prefetch es_kernels_prefetch(void);

/* Choose another one: 0, or -1 if there is no such level or `bytes` is not in 0 .. 1 MiB. */
ES_API int es_kernels_set_prefetch(struct es_prefetch prefetch);

/* What Linux says to this process when it wants AMX's tile registers: 0, it may use them; an errno; -1: the processor has
 * none. */
ES_API int es_kernels_tiles(void);

/* From how many tokens on products go through tile registers, from 16 on, or 0, never; 16 at start. Results do not depend on it.
 * 0, or -1 for other numbers. */
ES_API int es_kernels_set_wide_from(int64_t tokens);

/* Why ggml_backend_init refused the ggml it found; "" if it did not. */
ES_API const char *es_kernels_refusal(void);

/* Whether weights of models loaded from now on are packed; on at start. */
ES_API void es_kernels_enable(int on);

/* The device, for a library that is given one. Backends of it that this thread makes have n_threads; their memory is
 * ordinary, or weights' while this thread asks for that. */
ES_API void *es_kernels_device(int n_threads);
ES_API void es_kernels_ask_for_weights(int on);

/* Let the next buffer of packed weights that has `size` bytes be a private map of those of a file from `offset` on, a
 * multiple of 2 MiB: what packing gave before, of the same tensors at the same places (`es_packed`). fd < 0: no longer. */
ES_API void es_kernels_map(int fd, int64_t offset, int64_t size);

/* Of passes that this thread makes from now on, compute the logits of the last `n` tokens only, where the graph has those
 * of more: the rows of the others are left as they are. -1, as at start: of all. A hidden state is given by ggml's
 * rules only together with its token's logits, which cost as much as a sixth of a model. */
ES_API void es_kernels_want_logits(int64_t n);

/* Hidden states that passes leave: for each wanted token a row of `out`, float32 [capacity][n_layers][width]. They are
 * copied while the graph runs: no pass, no part of a graph more. Tensors are known by the names that llama.cpp gives
 * them, "l_out-N" and "result_norm". */
#define ES_MOST_HIDDEN 8
#define ES_LAST_NORM (-1)
struct es_hidden {
    int32_t n_layers;                /* 1 to ES_MOST_HIDDEN */
    int32_t layers[ES_MOST_HIDDEN];  /* from 0: the residual after that layer; ES_LAST_NORM: what the logits come from */
    int32_t n_all_layers;            /* of the model */
    int64_t width;                   /* of a hidden state */
    int64_t n_tokens, capacity;      /* tokens of the passes; rows of `out` */
    const uint8_t *wanted;           /* [n_tokens], in the order of the batch; after the last layer and the last norm a
                                      * graph has only tokens whose logits were asked for: they must be the wanted ones */
    float *out;
};

/* Leave these of the passes that this thread makes from now on, until it is told otherwise; NULL: none. 0, or -1 for
 * what cannot be, such as more wanted tokens than rows: then none. */
ES_API int es_kernels_keep_hidden(const struct es_hidden *asked);

/* Rows that the passes since then have left; -1 if they are not complete, as where other kernels ran a layer. */
ES_API int64_t es_kernels_n_hidden(void);

struct es_packed {
    char name[64];
    char type[16];
    int64_t rows, columns; /* rows of all its matrices */
    int64_t bytes;         /* packed */
    const void *data;      /* as long as the model is loaded */
    int64_t offset;        /* of it in its buffer */
};

/* Tensors packed since the process began, and the i-th of them: 0, or -1 if there is none. */
ES_API int64_t es_kernels_n_packed(void);
ES_API int es_kernels_packed(int64_t i, struct es_packed *out);

/* ---- a matrix beside a model's own, packed once: what joins token and state for a draft head ---- */

struct es_matrix;
/* `rows` x `columns` weights of ggml's type, `size` bytes. NULL: they cannot be packed, or there is no memory. */
ES_API struct es_matrix *es_kernels_matrix_new(int type, int64_t rows, int64_t columns, const uint8_t *weights,
                                               size_t size);
ES_API void es_kernels_matrix_free(struct es_matrix *matrix);
/* y[n][rows] = x[n][columns] * weights^T on n_threads threads; n_x and n_y: floats of both. One product at a time. 0, or
 * -1 for what cannot be. */
ES_API int es_kernels_matrix_multiply(struct es_matrix *matrix, int64_t n, const float *x, size_t n_x, float *y,
                                      size_t n_y, int n_threads);

/* ---- the kernels without ggml, for tests; -1 for arguments they cannot take, else 0 ---- */

/* Pack `rows` x `columns` weights of ggml's type and turn them back into the same bytes. */
ES_API int es_kernels_repack(int type, int64_t rows, int64_t columns, const uint8_t *weights, size_t size,
                             uint8_t *out);

/* y[n][rows] = x[n][columns] * weights^T on n_threads threads. */
ES_API int es_kernels_matmul(int type, int64_t rows, int64_t columns, const uint8_t *weights, size_t size, int64_t n,
                             const float *x, float *y, int n_threads);

/* y[n][n_used][rows]: the product of x[n][columns] with each of the n_used matrices that ids[n][n_used] names, of
 * `n_experts` with `rows` rows each; with `shared` 0 each has an x of its own, x[n][n_used][columns]. */
ES_API int es_kernels_experts(int type, int64_t n_experts, int64_t rows, int64_t columns, const uint8_t *weights,
                              size_t size, int64_t n, int64_t n_used, const int32_t *ids, int shared, const float *x,
                              float *y, int n_threads);

/* Attention of n tokens, float32 q[n][n_head][head_dim], over n_kv cached ones, k[n_kv][n_head_kv][head_dim] and
 * v[n_kv][n_head_kv][value_dim] of ggml's `cache_type`, F16, Q8_0 or Q4_0; F16 mask[n][n_kv] is added to the scores, where it is
 * not NULL. In F32, without a mask: full attention, in which keys and values are quantized, too. */
struct es_attention {
    int64_t head_dim, value_dim, n_head, n_head_kv, n, n_kv;
    const float *q;
    const void *k, *v;
    const uint16_t *mask;
    const float *sinks; /* of each head, or NULL */
    float scale;
    float soft_cap; /* 0: none */
    int32_t cache_type;
};
/* out[n][n_head][value_dim] */
ES_API int es_kernels_attention(const struct es_attention *attention, float *out, int n_threads);

/* y[n] = a unary operation, ggml's number, of x[n]. */
ES_API int es_kernels_unary(int operation, int64_t n, const float *x, float *y);

/* A gated delta net: out[sequences][tokens][heads][width], then the states after the last tokens, the last one first,
 * [slots][sequences][heads][width][width], of which only as many are written as there are tokens. */
struct es_delta_net {
    int64_t width, heads, key_heads, tokens, sequences, slots;
    int64_t decays;           /* of each token and head: 1, or `width` */
    const float *q, *k;       /* [sequences][tokens][key_heads][width] */
    const float *v;           /* [sequences][tokens][heads][width] */
    const float *decay;       /* its logarithm, [sequences][tokens][heads][decays] */
    const float *beta;        /* [sequences][tokens][heads] */
    const float *state;       /* [sequences][heads][width][width] */
};
ES_API int es_kernels_delta_net(const struct es_delta_net *net, float *out, int n_threads);

/* A state space (Mamba-2): out[sequences][tokens][heads][rows], then the states as above,
 * [slots][sequences][heads][rows][width]. */
struct es_state_scan {
    int64_t width, rows, heads, groups, tokens, sequences, slots;
    const float *x;     /* [sequences][tokens][heads][rows] */
    const float *dt;    /* [sequences][tokens][heads] */
    const float *a;     /* [heads] */
    const float *b, *c; /* [sequences][tokens][groups][width] */
    const float *state; /* [sequences][heads][rows][width] */
};
ES_API int es_kernels_state_scan(const struct es_state_scan *scan, float *out, int n_threads);

/* out[n], F16, Q8_0 or Q4_0 of ggml's `type`: floats as a cache keeps them; n is a multiple of 32. */
ES_API int es_kernels_cached(int type, int64_t n, const float *x, uint8_t *out);

/* y[rows][width]: rows of x times matrix[width][width], of which only that it is a Hadamard matrix over sqrt(width) is used
 * where `width` is a power of two from 64 on. */
ES_API int es_kernels_hadamard(int64_t width, int64_t rows, const float *matrix, const float *x, float *y, int n_threads);

/* ---- how fast the kernels are, without ggml, over weights that come from memory ---- */

/* Memory full of weights, which the functions below walk through, on from where the last of them ended; it ought to be
 * much larger than the caches. NULL: no memory. */
struct es_stream;
ES_API struct es_stream *es_kernels_stream_new(size_t bytes);
ES_API void es_kernels_stream_free(struct es_stream *stream);

struct es_shape {
    int32_t type; /* ggml's number */
    int64_t rows, columns;
};

/* Seconds that the products of n tokens with these matrices, one after another, take n_threads threads: the products
 * alone, without the quantization of activations. -1: what cannot be packed, or does not fit into the stream. */
ES_API double es_kernels_time_products(struct es_stream *stream, const struct es_shape *shapes, int64_t n_shapes,
                                       int64_t n, struct es_prefetch prefetch, int n_threads);

/* Bytes of such a matrix, packed; -1: it cannot be. */
ES_API int64_t es_kernels_packed_bytes(const struct es_shape *shape);

/* Seconds that reading `bytes` of the stream takes; -1: it has fewer. */
ES_API double es_kernels_time_read(struct es_stream *stream, size_t bytes, struct es_prefetch prefetch, int n_threads);

/* Multiply-adds a second of the instruction set's dot product, from registers, on n_threads threads for so many rounds;
 * -1 for numbers below 1. */
ES_API double es_kernels_peak(int64_t rounds, int n_threads);

#ifdef __cplusplus
}
#endif

#endif
