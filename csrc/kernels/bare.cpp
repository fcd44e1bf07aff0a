// The kernels without ggml: tensors made by hand, run by the same executor. Matrices beside a model's own; the rest is for
// tests.
#include "edgespec_kernels.h"
#include "packed.h"
#include "tensor.h"

#include <string.h>

#include <algorithm>
#include <numeric>
#include <utility>

using namespace edgespec;
using ggml::Tensor;

namespace {

Tensor make_tensor(int type, size_t size, int64_t n0, int64_t n1, int64_t n2, const void *data, int64_t n3 = 1) {
    Tensor t = {};
    t.type = type;
    t.ne[0] = n0;
    t.ne[1] = n1;
    t.ne[2] = n2;
    t.ne[3] = n3;
    t.nb[0] = size;
    t.nb[1] = size * (size_t)n0;
    t.nb[2] = t.nb[1] * (size_t)n1;
    t.nb[3] = t.nb[2] * (size_t)n2;
    t.data = (void *)data;
    t.flags = ggml::FLAG_COMPUTE;
    return t;
}

const Isa *isa() { return find_isa(es_kernels_isa()); }

// A weight tensor with room for the packed form; none if these weights cannot be packed.
struct Weights {
    Tensor tensor;
    std::unique_ptr<uint8_t[]> memory;

    bool pack_from(int type, int64_t matrices, int64_t rows, int64_t columns, const uint8_t *blocks, size_t size) {
        if (matrices < 1 || rows < 1 || columns < 1 || matrices > 1 << 10 || rows > 1 << 20 || columns > 1 << 20) {
            return false;
        }
        tensor = make_tensor(type, 0, columns, rows, matrices, nullptr);
        if (!can_pack(&tensor) || plain_size(&tensor) != size) {
            return false;
        }
        memory.reset(new uint8_t[packed_size(*isa(), &tensor) + 64]);
        tensor.data = (void *)(((uintptr_t)memory.get() + 63) & ~(uintptr_t)63);
        pack(*isa(), &tensor, blocks);
        return true;
    }
};

const Ggml NO_GGML = {};

Executor make_executor() {
    const es_prefetch chosen = es_kernels_prefetch();
    return Executor(*isa(), {chosen.level, chosen.bytes}, NO_GGML);
}

int run(Executor &executor, const std::vector<Tensor *> &nodes, int n_threads) {
    executor.n_threads = n_threads;
    return executor.compute(nodes) == ggml::STATUS_SUCCESS ? 0 : -1;
}

int run(const std::vector<Tensor *> &nodes, int n_threads) {
    Executor executor = make_executor();
    return run(executor, nodes, n_threads);
}

} // namespace

struct es_matrix {
    Weights weights;
    Executor executor = make_executor(); // it keeps its work memory
};

extern "C" {

es_matrix *es_kernels_matrix_new(int type, int64_t rows, int64_t columns, const uint8_t *weights, size_t size) {
    try {
        auto matrix = isa() ? std::make_unique<es_matrix>() : nullptr;
        return matrix && matrix->weights.pack_from(type, 1, rows, columns, weights, size) ? matrix.release() : nullptr;
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void es_kernels_matrix_free(es_matrix *matrix) { delete matrix; }

int es_kernels_matrix_multiply(es_matrix *matrix, int64_t n, const float *x, size_t n_x, float *y, size_t n_y,
                               int n_threads) {
    Tensor &w = matrix->weights.tensor;
    const int64_t columns = w.ne[0], rows = w.ne[1];
    if (n < 1 || n > 1 << 20 || n_threads < 1 || n_x != (size_t)(n * columns) || n_y != (size_t)(n * rows)) {
        return -1;
    }
    Tensor tx = make_tensor(ggml::TYPE_F32, 4, columns, n, 1, x), ty = make_tensor(ggml::TYPE_F32, 4, rows, n, 1, y);
    ty.op = ggml::OP_MUL_MAT;
    ty.src[0] = &w;
    ty.src[1] = &tx;
    try {
        return run(matrix->executor, {&ty}, n_threads);
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

int es_kernels_repack(int type, int64_t rows, int64_t columns, const uint8_t *weights, size_t size, uint8_t *out) {
    Weights w;
    if (!isa() || !w.pack_from(type, 1, rows, columns, weights, size)) {
        return -1;
    }
    unpack(*isa(), &w.tensor, out);
    return 0;
}

int es_kernels_matmul(int type, int64_t rows, int64_t columns, const uint8_t *weights, size_t size, int64_t n,
                      const float *x, float *y, int n_threads) {
    es_matrix *const matrix = es_kernels_matrix_new(type, rows, columns, weights, size);
    const int code =
        matrix && n > 0 ? es_kernels_matrix_multiply(matrix, n, x, (size_t)(n * columns), y, (size_t)(n * rows), n_threads) : -1;
    es_kernels_matrix_free(matrix);
    return code;
}

int es_kernels_experts(int type, int64_t n_experts, int64_t rows, int64_t columns, const uint8_t *weights, size_t size,
                       int64_t n, int64_t n_used, const int32_t *ids, int shared, const float *x, float *y,
                       int n_threads) {
    Weights w;
    if (!isa() || n < 1 || n_used < 1 || n_threads < 1 || !w.pack_from(type, n_experts, rows, columns, weights, size)) {
        return -1;
    }
    Tensor tx = make_tensor(ggml::TYPE_F32, 4, columns, shared ? 1 : n_used, n, x);
    Tensor ti = make_tensor(ggml::TYPE_I32, 4, n_used, n, 1, ids);
    Tensor ty = make_tensor(ggml::TYPE_F32, 4, rows, n_used, n, y);
    ty.op = ggml::OP_MUL_MAT_ID;
    ty.src[0] = &w.tensor;
    ty.src[1] = &tx;
    ty.src[2] = &ti;
    return run({&ty}, n_threads);
}

int es_kernels_attention(const es_attention *a, float *out, int n_threads) {
    if (!isa() || a->head_dim < 1 || a->value_dim < 1 || a->n_head_kv < 1 || a->n < 1 || a->n_kv < 1 || n_threads < 1) {
        return -1;
    }
    // ggml's views: tokens in dimension 1, heads in dimension 2.
    const auto heads = [](int type, int64_t dim, int64_t n_heads, int64_t tokens, const void *data) {
        const CacheFormat format = ggml::cache_format(type);
        const bool is_quantized = format == Q8_CACHE || format == Q4_CACHE;
        const size_t size = is_quantized ? (size_t)CACHE_BLOCK[format] : type == ggml::TYPE_F32 ? 4 : 2;
        Tensor t = make_tensor(type, size, is_quantized ? dim / 32 : dim, n_heads, tokens, data);
        t.ne[0] = dim;
        std::swap(t.ne[1], t.ne[2]);
        std::swap(t.nb[1], t.nb[2]);
        return t;
    };
    Tensor tq = heads(ggml::TYPE_F32, a->head_dim, a->n_head, a->n, a->q);
    Tensor tk = heads(a->cache_type, a->head_dim, a->n_head_kv, a->n_kv, a->k);
    Tensor tv = heads(a->cache_type, a->value_dim, a->n_head_kv, a->n_kv, a->v);
    Tensor tm = make_tensor(ggml::TYPE_F16, 2, a->n_kv, a->n, 1, a->mask);
    Tensor ts = make_tensor(ggml::TYPE_F32, 4, a->n_head, 1, 1, a->sinks);
    Tensor to = make_tensor(ggml::TYPE_F32, 4, a->value_dim, a->n_head, a->n, out);
    to.op = ggml::OP_FLASH_ATTN_EXT;
    memcpy(&to.op_params[0], &a->scale, 4);
    memcpy(&to.op_params[2], &a->soft_cap, 4);
    to.src[0] = &tq;
    to.src[1] = &tk;
    to.src[2] = &tv;
    to.src[3] = a->mask ? &tm : nullptr;
    to.src[4] = a->sinks ? &ts : nullptr;
    return can_run(&to, NO_GGML) ? run({&to}, n_threads) : -1;
}

int es_kernels_unary(int operation, int64_t n, const float *x, float *y) {
    if (!isa() || n < 1) {
        return -1;
    }
    Tensor tx = make_tensor(ggml::TYPE_F32, 4, n, 1, 1, x), ty = make_tensor(ggml::TYPE_F32, 4, n, 1, 1, y);
    ty.op = ggml::OP_UNARY;
    ty.op_params[0] = operation;
    ty.src[0] = &tx;
    return can_run(&ty, NO_GGML) ? run({&ty}, 1) : -1;
}

int es_kernels_delta_net(const es_delta_net *a, float *out, int n_threads) {
    if (!isa() || a->width < 1 || a->heads < 1 || a->key_heads < 1 || a->heads % a->key_heads || a->tokens < 1 ||
        a->sequences < 1 || a->slots < 1 || (a->decays != 1 && a->decays != a->width) || n_threads < 1) {
        return -1;
    }
    const auto rows = [&](int64_t width, int64_t heads, int64_t n, const float *data) {
        return make_tensor(ggml::TYPE_F32, 4, width, heads, n, data, a->sequences);
    };
    Tensor tq = rows(a->width, a->key_heads, a->tokens, a->q), tk = rows(a->width, a->key_heads, a->tokens, a->k);
    Tensor tv = rows(a->width, a->heads, a->tokens, a->v), tg = rows(a->decays, a->heads, a->tokens, a->decay);
    Tensor tb = rows(1, a->heads, a->tokens, a->beta), ts = rows(a->width, a->width, a->heads, a->state);
    const int64_t n_rows = (a->tokens + a->slots * a->width) * a->sequences;
    Tensor to = make_tensor(ggml::TYPE_F32, 4, a->width * a->heads, n_rows, 1, out);
    to.op = ggml::OP_GATED_DELTA_NET;
    to.op_params[0] = (int32_t)a->slots;
    Tensor *const sources[] = {&tq, &tk, &tv, &tg, &tb, &ts};
    std::copy(std::begin(sources), std::end(sources), to.src);
    return can_run(&to, NO_GGML) ? run({&to}, n_threads) : -1;
}

int es_kernels_state_scan(const es_state_scan *a, float *out, int n_threads) {
    if (!isa() || a->width < 1 || a->rows < 1 || a->heads < 1 || a->groups < 1 || a->heads % a->groups ||
        a->tokens < 1 || a->sequences < 1 || a->slots < 1 || n_threads < 1) {
        return -1;
    }
    const int64_t n = a->sequences;
    std::vector<int32_t> ids((size_t)n);
    std::iota(ids.begin(), ids.end(), 0);
    Tensor ts = make_tensor(ggml::TYPE_F32, 4, a->width, a->rows, a->heads, a->state, n);
    Tensor tx = make_tensor(ggml::TYPE_F32, 4, a->rows, a->heads, a->tokens, a->x, n);
    Tensor td = make_tensor(ggml::TYPE_F32, 4, a->heads, a->tokens, n, a->dt);
    Tensor ta = make_tensor(ggml::TYPE_F32, 4, 1, a->heads, 1, a->a);
    Tensor tb = make_tensor(ggml::TYPE_F32, 4, a->width, a->groups, a->tokens, a->b, n);
    Tensor tc = make_tensor(ggml::TYPE_F32, 4, a->width, a->groups, a->tokens, a->c, n);
    Tensor ti = make_tensor(ggml::TYPE_I32, 4, n, 1, 1, ids.data());
    const int64_t size = a->rows * a->heads * n * (a->tokens + a->slots * a->width);
    Tensor to = make_tensor(ggml::TYPE_F32, 4, size, 1, 1, out);
    to.op = ggml::OP_SSM_SCAN;
    to.op_params[0] = (int32_t)a->slots;
    Tensor *const sources[] = {&ts, &tx, &td, &ta, &tb, &tc, &ti};
    std::copy(std::begin(sources), std::end(sources), to.src);
    return can_run(&to, NO_GGML) ? run({&to}, n_threads) : -1;
}

int es_kernels_cached(int type, int64_t n, const float *x, uint8_t *out) {
    if (!isa() || n < 1 || n % 32) {
        return -1;
    }
    switch (ggml::cache_format(type)) {
    case F16_CACHE: isa()->to_half(n, x, (uint16_t *)out); return 0;
    case Q8_CACHE: isa()->to_q8(n, x, out); return 0;
    case Q4_CACHE: isa()->to_q4(n, x, out); return 0;
    default: return -1;
    }
}

int es_kernels_hadamard(int64_t width, int64_t rows, const float *matrix, const float *x, float *y, int n_threads) {
    if (!isa() || width < 1 || rows < 1 || n_threads < 1) {
        return -1;
    }
    Tensor th = make_tensor(ggml::TYPE_F32, 4, width, width, 1, matrix);
    Tensor tx = make_tensor(ggml::TYPE_F32, 4, width, rows, 1, x), ty = make_tensor(ggml::TYPE_F32, 4, width, rows, 1, y);
    ty.op = ggml::OP_MUL_MAT;
    ty.op_params[1] = ggml::HINT_HADAMARD;
    ty.src[0] = &th;
    ty.src[1] = &tx;
    return can_run(&ty, NO_GGML) ? run({&ty}, n_threads) : -1;
}
}
