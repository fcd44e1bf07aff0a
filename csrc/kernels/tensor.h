// Rows and parameters of ggml's tensors.
#pragma once

#include "ggml_abi.h"
#include "isa.h"

#include <string.h>

namespace edgespec::ggml {

template <class T> T *at(const Tensor *t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (T *)((char *)t->data + i1 * (int64_t)t->nb[1] + i2 * (int64_t)t->nb[2] + i3 * (int64_t)t->nb[3]);
}
inline int64_t n_rows(const Tensor *t) { return t->ne[1] * t->ne[2] * t->ne[3]; }
// Row `r` of all rows of t, in the order of ggml; rows of a smaller tensor repeat.
template <class T> T *row(const Tensor *t, int64_t r, const Tensor *shape) {
    const int64_t i1 = r % shape->ne[1], i2 = r / shape->ne[1] % shape->ne[2], i3 = r / (shape->ne[1] * shape->ne[2]);
    return at<T>(t, i1 % t->ne[1], i2 % t->ne[2], i3 % t->ne[3]);
}
inline bool same_shape(const Tensor *a, const Tensor *b) { return !memcmp(a->ne, b->ne, sizeof a->ne); }
inline bool is_view(const Tensor *t) {
    return t->op == OP_NONE || t->op == OP_RESHAPE || t->op == OP_VIEW || t->op == OP_PERMUTE || t->op == OP_TRANSPOSE;
}
inline const uint8_t *packed_data(const Tensor *w) { return (const uint8_t *)w->data; }
inline float param(const Tensor *op, int i) {
    float x;
    memcpy(&x, &op->op_params[i], 4);
    return x;
}

// How a cache of this type is held; N_CACHES: no cache has it.
inline CacheFormat cache_format(int type) {
    return type == TYPE_F16 ? F16_CACHE : type == TYPE_Q8_0 ? Q8_CACHE : type == TYPE_Q4_0 ? Q4_CACHE : N_CACHES;
}

inline const float *column(const Tensor *x, int64_t c) { return row<const float>(x, c, x); }

} // namespace edgespec::ggml
