/* Whisper's encoder and decoder on ggml, for Python (edgespec/apps/speech/whisper_model.py).
 *
 *     model  ->  audio (a window of sound, as the decoder hears it)  ->  cache (the KV cache of its sequences)
 *
 * Objects may be freed in any order: each keeps what it needs. A model runs one pass at a time, whatever thread asks;
 * a cache does one thing at a time.
 * Functions that can fail return NULL or a negative number, and write why into `reason`, one line of at most
 * `n_reason` bytes with its zero. All lengths are checked; files, tokens and numbers are not trusted. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ES_WHISPER_API __attribute__((visibility("default")))

typedef struct es_whisper_model es_whisper_model;
typedef struct es_whisper_audio es_whisper_audio;
typedef struct es_whisper_cache es_whisper_cache;

/* OpenAI's names. */
typedef struct es_whisper_dims {
    int32_t n_mels, n_vocab;
    int32_t n_audio_ctx, n_audio_state, n_audio_head, n_audio_layer;
    int32_t n_text_ctx, n_text_state, n_text_head, n_text_layer;
    int32_t is_multilingual, n_alignment_heads;
} es_whisper_dims;

/* Tokens that a pass appends to a sequence; the last n_parents are a tree in depth-first order, parents[i] being the
 * node before node i, or -1. After the pass the trunk stays: the nodes up to the first that does not follow the one
 * before it. */
typedef struct es_whisper_part {
    int32_t sequence;
    const int32_t *tokens;
    size_t n_tokens;
    size_t n_logits; /* of the last tokens */
    const int32_t *parents;
    size_t n_parents;
} es_whisper_part;

/* n_threads >= 1. kernels: whether to use edgespec's, where ggml has loaded them and they run all of the model. */
ES_WHISPER_API es_whisper_model *es_whisper_open(const char *path, int32_t n_threads, int32_t kernels, char *reason,
                                                 size_t n_reason);
ES_WHISPER_API void es_whisper_free(es_whisper_model *model);
ES_WHISPER_API es_whisper_dims es_whisper_get_dims(const es_whisper_model *model);
/* n_pairs of (layer, head). Returns 0. */
ES_WHISPER_API int es_whisper_alignment_heads(const es_whisper_model *model, int32_t *pairs, size_t n_pairs);
/* Why ggml's own kernels are used; "" if edgespec's are. */
ES_WHISPER_API const char *es_whisper_kernels_reason(const es_whisper_model *model);

/* mel: n_mels rows of 2 n_audio_ctx floats, n in all. */
ES_WHISPER_API es_whisper_audio *es_whisper_encode(es_whisper_model *model, const float *mel, size_t n, char *reason,
                                                   size_t n_reason);
/* states: n_audio_ctx rows of n_audio_state floats, n in all. */
ES_WHISPER_API es_whisper_audio *es_whisper_cross_from(es_whisper_model *model, const float *states, size_t n,
                                                       char *reason, size_t n_reason);
ES_WHISPER_API void es_whisper_audio_free(es_whisper_audio *audio);
/* The encoder's states, n floats. Returns 0. */
ES_WHISPER_API int es_whisper_states(const es_whisper_audio *audio, float *states, size_t n);

/* The windows are of one model; the first n_sequences listen to the first of them, the next ones to the second, ... */
ES_WHISPER_API es_whisper_cache *es_whisper_cache_new(es_whisper_audio *const *windows, size_t n_windows,
                                                      int32_t n_sequences, char *reason, size_t n_reason);
ES_WHISPER_API void es_whisper_cache_free(es_whisper_cache *cache);
/* One pass; the rows of logits of the parts follow each other, n floats in all. Returns 0. */
ES_WHISPER_API int es_whisper_forward(es_whisper_cache *cache, const es_whisper_part *parts, size_t n_parts,
                                      float *logits, size_t n, char *reason, size_t n_reason);
/* Tokens of a sequence; -1: there is no such sequence. */
ES_WHISPER_API int es_whisper_n_past(const es_whisper_cache *cache, int32_t sequence);
/* Keep the first n_keep tokens. Returns 0, or -1 if there are fewer. */
ES_WHISPER_API int es_whisper_rewind(es_whisper_cache *cache, int32_t sequence, int32_t n_keep);
/* Sequence i goes on from what sources[i], of the same window, holds; sequences past n become empty. Returns 0. */
ES_WHISPER_API int es_whisper_reorder(es_whisper_cache *cache, const int32_t *sources, size_t n);
/* Softmaxed weights [alignment head][token][state] of a pass over `tokens` alone, n floats, in the first window, and
 * the logits of the last tokens, n_logits floats. Returns 0. */
ES_WHISPER_API int es_whisper_cross_attention(es_whisper_cache *cache, const int32_t *tokens, size_t n_tokens,
                                              float *weights, size_t n, float *logits, size_t n_logits, char *reason,
                                              size_t n_reason);

#ifdef __cplusplus
}
#endif
