// Which operations are run.
#include "codebooks.h"
#include "full_attention.h"
#include "graph.h"
#include "tensor.h"

namespace edgespec {

using namespace ggml;

namespace {

bool is_rows(const Tensor *t, int type, size_t size) { return t && t->type == type && t->nb[0] == size; }
bool is_float_rows(const Tensor *t) { return is_rows(t, TYPE_F32, 4); }
bool is_cache(const Tensor *t) {
    const CacheFormat format = cache_format(t->type);
    return format == F16_CACHE ? t->nb[0] == 2
                               : format != N_CACHES && t->nb[0] == (size_t)CACHE_BLOCK[format] && t->ne[0] % 32 == 0;
}

// `small` may have one column, or one row, for all.
bool repeats_over(const Tensor *small, const Tensor *shape) {
    const auto divides = [](int64_t a, int64_t b) { return a == 0 ? b == 0 : b % a == 0; }; // a batch may want no logits
    return (small->ne[0] == shape->ne[0] || small->ne[0] == 1) && divides(small->ne[1], shape->ne[1]) &&
           divides(small->ne[2], shape->ne[2]) && divides(small->ne[3], shape->ne[3]);
}

// Beside packed weights, those that cannot be packed are plain memory.
bool is_plain(const Tensor *t, const Ggml &ggml) {
    const Tensor *whole = t;
    while (whole->view_src) {
        whole = whole->view_src;
    }
    return ggml.backend_buft_is_host(t->buffer->buft) || (t->buffer->buft == ggml.packed && !can_pack(whole));
}

bool on_host(const Tensor *op, const Ggml &ggml, int from = 0) {
    for (int i = from; i < 10; i++) {
        const Tensor *src = op->src[i];
        if (src && src->buffer && !is_plain(src, ggml)) {
            return false;
        }
    }
    return true;
}

// Whether `t` is a product that is left to ggml.
bool is_foreign_product(const Tensor *t, const Ggml &ggml) {
    while (t && t->view_src) {
        t = t->view_src;
    }
    if (!t || (t->op != OP_MUL_MAT && t->op != OP_MUL_MAT_ID) || t->src[0]->type == TYPE_F32) {
        return false;
    }
    return t->src[0]->buffer && !is_packed_matmul(t, ggml);
}

bool is_dense(const Tensor *t) {
    return t->nb[1] == (size_t)t->ne[0] * 4 && t->nb[2] == t->nb[1] * (size_t)t->ne[1] &&
           t->nb[3] == t->nb[2] * (size_t)t->ne[2];
}

bool can_unary(const Tensor *op) {
    switch (op->op_params[0]) {
    case UNARY_NEG:
    case UNARY_TANH:
    case UNARY_RELU:
    case UNARY_SIGMOID:
    case UNARY_GELU:
    case UNARY_SILU:
    case UNARY_EXP:
    case UNARY_SOFTPLUS:
    case UNARY_GELU_ERF:
        return true;
    default:
        return false;
    }
}

bool can_glu(const Tensor *op) {
    switch (op->op_params[0]) {
    case GLU_REGLU:
    case GLU_GEGLU:
    case GLU_SWIGLU:
    case GLU_SWIGLU_OAI:
    case GLU_GEGLU_QUICK:
    case GLU_SWIGLU_CLAMP:
        return true;
    default:
        return false;
    }
}

bool can_rope(const Tensor *op) {
    const Tensor *a = op->src[0], *b = op->src[1], *factors = op->src[2];
    const int32_t mode = op->op_params[2], *const sections = op->op_params + 11;
    const bool has_sections = mode == ROPE_MROPE || mode == ROPE_IMROPE;
    return is_float_rows(op) && is_float_rows(a) && is_rows(b, TYPE_I32, 4) && b->op == OP_NONE && op->ne[3] == 1 &&
           (has_sections ? sections[0] + sections[1] + sections[2] + sections[3] > 0 && b->ne[0] == 4 * a->ne[2]
                         : mode == ROPE_NORMAL || mode == ROPE_NEOX) &&
           (!factors || (is_float_rows(factors) && factors->op == OP_NONE));
}

// An input of the graph, of `seen` cells for each of n tokens.
bool is_mask(const Tensor *mask, int64_t n, int64_t seen) {
    return is_rows(mask, TYPE_F16, 2) && mask->op == OP_NONE && mask->ne[0] == seen && mask->ne[1] >= n &&
           mask->ne[2] == 1 && mask->ne[3] == 1;
}

bool can_attend(const Tensor *op) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3], *sinks = op->src[4];
    const float max_bias = param(op, 1);
    return is_float_rows(op) && is_float_rows(q) && is_cache(k) && is_cache(v) && k->type == v->type &&
           (!mask || is_mask(mask, q->ne[1], k->ne[1])) && (!sinks || is_float_rows(sinks)) && max_bias == 0 &&
           q->ne[3] == 1 && k->ne[3] == 1 && q->ne[0] == k->ne[0] && q->ne[0] % 16 == 0 && q->ne[0] <= MAX_HEAD_DIM &&
           v->ne[0] <= k->ne[0] && v->ne[0] % 16 == 0 && k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0;
}

bool can_delta_net(const Tensor *op) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *g = op->src[3], *beta = op->src[4], *s = op->src[5];
    const int64_t width = v->ne[0];
    return is_float_rows(q) && is_float_rows(k) && is_float_rows(v) && is_float_rows(g) && is_float_rows(beta) &&
           is_float_rows(s) && is_dense(s) && is_dense(op) && q->ne[0] == width && k->ne[0] == width &&
           (width == 16 || width == 32 || width == 64 || width == 128);
}

bool can_scan(const Tensor *op) {
    const Tensor *s = op->src[0], *x = op->src[1], *dt = op->src[2], *a = op->src[3], *b = op->src[4], *c = op->src[5];
    const int64_t width = s->ne[0];
    return is_float_rows(s) && is_dense(s) && is_float_rows(x) && is_float_rows(dt) && is_float_rows(a) &&
           a->ne[0] == 1 && is_float_rows(b) && is_float_rows(c) && is_rows(op->src[6], TYPE_I32, 4) &&
           (width == 16 || width == 32 || width == 64 || width == 128 || width == 256);
}

// Floats into rows of a cache, or into float rows.
bool can_set_rows(const Tensor *op) {
    const Tensor *a = op->src[0], *b = op->src[1];
    const bool is_flat = n_rows(a) == a->ne[1] && n_rows(op) == op->ne[1];
    return is_float_rows(a) && (is_rows(b, TYPE_I64, 8) || is_rows(b, TYPE_I32, 4)) &&
           ((is_cache(op) && is_flat) || is_float_rows(op));
}

} // namespace

bool is_hadamard(const Tensor *op) {
    const Tensor *h = op->src[0], *x = op->src[1];
    return op->op == OP_MUL_MAT && op->op_params[1] == HINT_HADAMARD && is_float_rows(h) && h->ne[0] >= 64 &&
           !(h->ne[0] & (h->ne[0] - 1)) && is_float_rows(x) && x->ne[0] == h->ne[0] && is_dense(x) && is_dense(op);
}

bool can_pack(const Tensor *w) {
    const Type type = find_type(w->type);
    return type != N_TYPES && (!is_coded(type) || codebook(type).is_known) && w->ne[3] == 1 && w->ne[2] >= 1 && w->ne[1] >= 1 && w->ne[0] >= 32 &&
           w->ne[0] % FORMATS[type].block == 0;
}

bool is_packed_matmul(const Tensor *op, const Ggml &ggml) {
    if (op->op != OP_MUL_MAT && op->op != OP_MUL_MAT_ID) {
        return false;
    }
    const Tensor *w = op->src[0], *x = op->src[1];
    return w->buffer && w->buffer->buft == ggml.packed && !w->view_src && can_pack(w) && is_float_rows(x) &&
           is_float_rows(op) && is_dense(op) && on_host(op, ggml, 1) &&
           (op->op == OP_MUL_MAT || is_rows(op->src[2], TYPE_I32, 4));
}

bool can_run(const Tensor *op, const Ggml &ggml) {
    const Tensor *a = op->src[0], *b = op->src[1];
    if (is_view(op)) {
        return true;
    }
    if (op->op == OP_FILL) {
        return is_float_rows(op);
    }
    if (!a || !on_host(op, ggml)) {
        return false;
    }
    const bool floats = is_float_rows(op) && is_float_rows(a);
    // A sum or a gate stays with the products that it is made of: a change from one library to the other costs more.
    if ((op->op == OP_ADD || op->op == OP_MUL || op->op == OP_ADD_ID || op->op == OP_GLU || op->op == OP_UNARY) &&
        (is_foreign_product(a, ggml) || is_foreign_product(b, ggml))) {
        return false;
    }
    switch (op->op) {
    case OP_ADD:
    case OP_SUB:
    case OP_MUL:
    case OP_DIV:
        return floats && is_float_rows(b) && same_shape(op, a) && repeats_over(b, op);
    case OP_ADD_ID:
        return floats && is_float_rows(b) && is_rows(op->src[2], TYPE_I32, 4) && op->ne[3] == 1;
    case OP_RMS_NORM:
    case OP_SCALE:
    case OP_CLAMP:
    case OP_SQR:
    case OP_SQRT:
    case OP_SUM_ROWS:
    case OP_MEAN:
        return floats;
    case OP_UNARY:
        return floats && can_unary(op);
    case OP_SOFT_MAX:
        return floats && !b && !op->src[2] && param(op, 1) == 0;
    case OP_ARGSORT:
        return is_rows(op, TYPE_I32, 4) && is_float_rows(a);
    case OP_GLU:
        return can_glu(op) && floats && (b ? is_float_rows(b) && same_shape(a, b) : true);
    case OP_MUL_MAT: // weights that are not packed: routers
        return floats && is_dense(op) && is_float_rows(b);
    case OP_NORM:
    case OP_L2_NORM:
        return floats;
    case OP_REPEAT:
        return op->type == TYPE_F32 && a->type == TYPE_F32;
    case OP_CONCAT:
        return op->type == TYPE_F32 && a->type == TYPE_F32 && b->type == TYPE_F32;
    case OP_SSM_CONV:
        return floats && is_float_rows(b) && op->ne[3] == 1;
    case OP_GATED_DELTA_NET:
        return can_delta_net(op);
    case OP_SSM_SCAN:
        return can_scan(op);
    case OP_CONT:
    case OP_CPY:
        return FullAttention::packs(op) || (a->type == TYPE_F32 &&
               (op->type == TYPE_F32 || (is_rows(op, TYPE_F16, 2) && a->nb[0] == 4 && same_shape(op, a))));
    case OP_ROPE:
        return can_rope(op);
    case OP_SET_ROWS:
        return can_set_rows(op);
    case OP_GET_ROWS:
        return floats && is_rows(b, TYPE_I32, 4);
    case OP_FLASH_ATTN_EXT:
        return FullAttention::fits(op) || can_attend(op);
    default:
        return false;
    }
}

} // namespace edgespec
