#include "full_attention.h"
#include "graph.h"
#include "tensor.h"

#include <algorithm>

namespace edgespec {

using namespace ggml;

void PackedRows::pack(const Isa &isa, int64_t group, const char *x, size_t row, size_t column, int64_t n_columns,
                      char *scratch, uint8_t *packed) const {
    const int64_t first = group * lanes, n = std::min<int64_t>(lanes, rows - first);
    uint8_t *const blocks = (uint8_t *)scratch + float_bytes();
    const bool is_whole = column == sizeof(float) && n_columns == columns;
    float *const floats = (float *)scratch;
    x += first * (int64_t)row;
    for (int64_t c = 0; !is_whole && c < n_columns; c++) { // by column: rows of values lie side by side
        for (int64_t r = 0; r < n; r++) {
            floats[r * columns + c] = *(const float *)(x + r * (int64_t)row + c * (int64_t)column);
        }
    }
    for (int64_t r = 0; r < n; r++) {
        if (!is_whole) {
            std::fill(floats + r * columns + n_columns, floats + (r + 1) * columns, 0.0f);
        }
        isa.to_q8(columns, is_whole ? (const float *)(x + r * (int64_t)row) : floats + r * columns,
                  blocks + r * row_bytes(TYPE, columns));
    }
    pack_group(TYPE, columns, isa.layout, (int)n, blocks, packed + group * bytes_of_group);
}

FullAttention::FullAttention(const Tensor *op, const Isa &isa)
    : head_dim(op->src[0]->ne[0]), value_dim(op->src[2]->ne[0]), n_heads(op->src[1]->ne[2]), n(op->src[0]->ne[1]),
      n_seen(op->src[1]->ne[1]), keys(head_dim, n_seen, isa.layout.lanes), values(n_seen, value_dim, isa.layout.lanes) {}

size_t FullAttention::thread_bytes() const {
    return std::max({query_bytes() + weight_bytes() + score_bytes(), keys.scratch_bytes(), values.scratch_bytes()});
}

bool FullAttention::fits(const Tensor *op) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    const auto floats = [](const Tensor *t) { return t->type == TYPE_F32 && t->nb[0] == 4 && t->ne[3] == 1; };
    const auto holds = [](const Tensor *t, int64_t columns, int64_t rows) { // one head after the other
        return t->type == TYPE_I8 && t->ne[3] == 1 && t->nb[2] % 64 == 0 &&
               t->nb[2] >= (size_t)PackedRows::most_bytes(columns, rows);
    };
    const bool is_packed = holds(k, k->ne[0], k->ne[1]) && holds(v, v->ne[1], v->ne[0]);
    return floats(op) && floats(q) && (is_packed || (floats(k) && floats(v))) && !op->src[3] && !op->src[4] &&
           param(op, 1) == 0 && param(op, 2) == 0 && q->ne[0] == k->ne[0] && q->ne[0] % 32 == 0 &&
           k->ne[1] == v->ne[1] && k->ne[1] > 0 && q->ne[2] == k->ne[2] && k->ne[2] == v->ne[2];
}

bool FullAttention::packs(const Tensor *op) {
    const Tensor *x = op->src[0];
    return op->type == TYPE_I8 && x->type == TYPE_F32 && same_shape(op, x) && op->ne[3] == 1 && op->nb[2] % 64 == 0 &&
           op->nb[2] >= (size_t)PackedRows::most_bytes(op->ne[0], op->ne[1]);
}

void Executor::plan_full_attention(Planning &p, const Tensor *op) {
    p.full = std::max(p.full, FullAttention(op, isa_).bytes(n_threads));
    if (op->src[1]->type == TYPE_F32) {
        steps_.emplace_back(&Executor::pack_seen, op);
    }
    steps_.emplace_back(&Executor::attend_all, op);
}

void Executor::plan_copy(Planning &p, const Tensor *op) {
    const bool packs = op->type == TYPE_I8;
    if (packs) {
        const PackedRows rows(op->ne[0], op->ne[1], isa_.layout.lanes);
        p.full = std::max(p.full, (size_t)n_threads * rows.scratch_bytes());
    }
    steps_.emplace_back(packs ? &Executor::pack_rows : &Executor::copy, op);
}

// Groups of keys, each a row of the product with the queries, and of values.
void Executor::pack_seen(const Step &step, int thread, int) {
    const Tensor *op = step.op, *k = op->src[1], *v = op->src[2];
    const FullAttention a(op, isa_);
    char *const scratch = full_ + a.packed_bytes() + (size_t)thread * a.thread_bytes();
    const int64_t of_head = a.keys.groups + a.values.groups, n_units = a.n_heads * of_head;
    for (int64_t unit; (unit = counters_[step.index].fetch_add(1, std::memory_order_relaxed)) < n_units;) {
        const int64_t head = unit / of_head, group = unit % of_head;
        uint8_t *const packed = (uint8_t *)full_ + (size_t)head * a.head_bytes();
        if (group < a.keys.groups) {
            a.keys.pack(isa_, group, at<const char>(k, 0, head), k->nb[1], k->nb[0], a.head_dim, scratch, packed);
        } else {
            a.values.pack(isa_, group - a.keys.groups, at<const char>(v, 0, head), v->nb[0], v->nb[1], a.n_seen, scratch,
                          packed + a.keys.bytes());
        }
    }
}

void Executor::pack_rows(const Step &step, int thread, int) {
    const Tensor *op = step.op, *x = op->src[0];
    const PackedRows rows(op->ne[0], op->ne[1], isa_.layout.lanes);
    char *const scratch = full_ + (size_t)thread * rows.scratch_bytes();
    const int64_t n_units = op->ne[2] * rows.groups;
    for (int64_t unit; (unit = counters_[step.index].fetch_add(1, std::memory_order_relaxed)) < n_units;) {
        const int64_t matrix = unit / rows.groups;
        rows.pack(isa_, unit % rows.groups, at<const char>(x, 0, matrix), x->nb[1], x->nb[0], x->ne[0], scratch,
                  at<uint8_t>(op, 0, matrix));
    }
}

void Executor::attend_all(const Step &step, int thread, int) {
    const Tensor *op = step.op, *q = op->src[0], *k = op->src[1], *v = op->src[2];
    const FullAttention a(op, isa_);
    const bool is_packed = k->type == TYPE_I8; // else by the step before
    char *const scratch = full_ + a.packed_bytes() + (size_t)thread * a.thread_bytes();
    int8_t *const queries = (int8_t *)scratch, *const weights = queries + a.query_bytes();
    float *const scores = (float *)(weights + a.weight_bytes());
    const int64_t n_units = a.n_heads * a.n_tiles();
    for (int64_t unit; (unit = counters_[step.index].fetch_add(1, std::memory_order_relaxed)) < n_units;) {
        const int64_t head = unit / a.n_tiles(), tile = unit % a.n_tiles();
        const int64_t begin = a.n * tile / a.n_tiles();
        const int nc = (int)(a.n * (tile + 1) / a.n_tiles() - begin);
        const uint8_t *const seen = (const uint8_t *)full_ + (size_t)head * a.head_bytes();
        const uint8_t *const keys = is_packed ? at<const uint8_t>(k, 0, head) : seen;
        const uint8_t *const values = is_packed ? at<const uint8_t>(v, 0, head) : seen + a.keys.bytes();
        MatmulFn *const multiply = isa_.matmul[prefetch_.level - 1]->of[PackedRows::TYPE][nc - 1];
        const auto product = [&](const PackedRows &rows, const uint8_t *groups, const int8_t *acts, float *const *y) {
            for (int64_t first = 0; first < rows.rows; first += rows.lanes, groups += rows.bytes_of_group) {
                multiply(groups, n_packets(PackedRows::TYPE, rows.columns), acts, y, first,
                         (int)std::min<int64_t>(rows.lanes, rows.rows - first), prefetch_.bytes);
            }
        };
        const int64_t columns = a.values.columns;
        float *score_of[MAX_TILE], *out[MAX_TILE];
        for (int c = 0; c < nc; c++) {
            score_of[c] = scores + c * columns;
            out[c] = at<float>(op, head, begin + c);
            isa_.quantize(at<const float>(q, begin + c, head), a.head_dim, BYTES_32, 0, a.head_dim / 32, queries, nc, c);
        }
        product(a.keys, keys, queries, score_of);
        for (int c = 0; c < nc; c++) {
            isa_.soft_max(a.n_seen, score_of[c], param(op, 0), score_of[c]);
            std::fill(score_of[c] + a.n_seen, score_of[c] + columns, 0.0f);
            isa_.quantize(score_of[c], columns, BYTES_32, 0, columns / 32, weights, nc, c);
        }
        product(a.values, values, weights, out);
    }
}

} // namespace edgespec
