#include "full_attention.h"
#include "graph.h"
#include "tensor.h"

#include <algorithm>

namespace edgespec {

using namespace ggml;

FullAttention::FullAttention(const Tensor *op, const Isa &isa)
    : head_dim(op->src[0]->ne[0]), value_dim(op->src[2]->ne[0]), n_heads(op->src[1]->ne[2]), n(op->src[0]->ne[1]),
      n_seen(op->src[1]->ne[1]), columns((n_seen + 31) / 32 * 32), lanes(isa.layout.lanes) {
    key_groups = n_groups(n_seen, lanes);
    value_groups = n_groups(value_dim, lanes);
    key_group_bytes = group_bytes(TYPE, head_dim, lanes);
    value_group_bytes = group_bytes(TYPE, columns, lanes);
}

bool FullAttention::fits(const Tensor *op) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    const auto floats = [](const Tensor *t) { return t->type == TYPE_F32 && t->nb[0] == 4 && t->ne[3] == 1; };
    return floats(op) && floats(q) && floats(k) && floats(v) && !op->src[3] && !op->src[4] && param(op, 1) == 0 &&
           param(op, 2) == 0 && q->ne[0] == k->ne[0] && q->ne[0] % 32 == 0 && k->ne[1] == v->ne[1] && k->ne[1] > 0 &&
           q->ne[2] == k->ne[2] && k->ne[2] == v->ne[2];
}

void Executor::plan_full_attention(Planning &p, const Tensor *op) {
    p.full = std::max(p.full, FullAttention(op, isa_).bytes(n_threads));
    steps_.emplace_back(&Executor::pack_seen, op);
    steps_.emplace_back(&Executor::attend_all, op);
}

// Groups of keys, each a row of the product with the queries, and of values, whose rows are dimensions.
void Executor::pack_seen(const Step &step, int thread, int) {
    const Tensor *op = step.op, *k = op->src[1], *v = op->src[2];
    const FullAttention a(op, isa_);
    char *const scratch = full_ + FullAttention::whole_lines((size_t)a.n_heads * a.head_bytes()) + (size_t)thread * a.thread_bytes();
    float *const transposed = (float *)scratch;
    uint8_t *const blocks = (uint8_t *)(scratch + a.score_bytes());
    const int64_t of_head = a.key_groups + a.value_groups, n_units = a.n_heads * of_head;
    const int64_t key_row = row_bytes(FullAttention::TYPE, a.head_dim), value_row = row_bytes(FullAttention::TYPE, a.columns);
    for (int64_t unit; (unit = counters_[step.index].fetch_add(1, std::memory_order_relaxed)) < n_units;) {
        const int64_t head = unit / of_head, group = unit % of_head;
        uint8_t *const packed = (uint8_t *)full_ + (size_t)head * a.head_bytes();
        if (group < a.key_groups) {
            const int64_t first = group * a.lanes, rows = std::min<int64_t>(a.lanes, a.n_seen - first);
            for (int64_t r = 0; r < rows; r++) {
                isa_.to_q8(a.head_dim, at<const float>(k, first + r, head), blocks + r * key_row);
            }
            pack_group(FullAttention::TYPE, a.head_dim, isa_.layout, (int)rows, blocks, packed + group * a.key_group_bytes);
            continue;
        }
        const int64_t value_group = group - a.key_groups, first = value_group * a.lanes;
        const int64_t rows = std::min<int64_t>(a.lanes, a.value_dim - first);
        for (int64_t t = 0; t < a.n_seen; t++) {
            const float *const value = at<const float>(v, t, head) + first;
            for (int64_t r = 0; r < rows; r++) {
                transposed[r * a.columns + t] = value[r];
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            std::fill(transposed + r * a.columns + a.n_seen, transposed + (r + 1) * a.columns, 0.0f);
            isa_.to_q8(a.columns, transposed + r * a.columns, blocks + r * value_row);
        }
        pack_group(FullAttention::TYPE, a.columns, isa_.layout, (int)rows, blocks,
                   packed + a.key_groups * a.key_group_bytes + value_group * a.value_group_bytes);
    }
}

void Executor::attend_all(const Step &step, int thread, int) {
    const Tensor *op = step.op, *q = op->src[0];
    const FullAttention a(op, isa_);
    char *const scratch = full_ + FullAttention::whole_lines((size_t)a.n_heads * a.head_bytes()) + (size_t)thread * a.thread_bytes();
    int8_t *const queries = (int8_t *)scratch, *const weights = queries + a.query_bytes();
    float *const scores = (float *)(weights + a.weight_bytes());
    const int64_t n_units = a.n_heads * a.n_tiles();
    for (int64_t unit; (unit = counters_[step.index].fetch_add(1, std::memory_order_relaxed)) < n_units;) {
        const int64_t head = unit / a.n_tiles(), tile = unit % a.n_tiles();
        const int64_t begin = a.n * tile / a.n_tiles();
        const int nc = (int)(a.n * (tile + 1) / a.n_tiles() - begin);
        const uint8_t *const packed = (const uint8_t *)full_ + (size_t)head * a.head_bytes();
        MatmulFn *const multiply = isa_.matmul[prefetch_.level - 1][FullAttention::TYPE][nc - 1];
        const auto product = [&](const uint8_t *groups, int64_t bytes, int64_t rows, int64_t columns, const int8_t *acts,
                                 float *const *y) {
            for (int64_t first = 0; first < rows; first += a.lanes, groups += bytes) {
                multiply(groups, n_packets(FullAttention::TYPE, columns), acts, y, first,
                         (int)std::min<int64_t>(a.lanes, rows - first), prefetch_.bytes);
            }
        };
        float *score_of[MAX_TILE], *out[MAX_TILE];
        for (int c = 0; c < nc; c++) {
            score_of[c] = scores + c * a.columns;
            out[c] = at<float>(op, head, begin + c);
            isa_.quantize(at<const float>(q, begin + c, head), a.head_dim, BYTES_32, 0, a.head_dim / 32, queries, nc, c);
        }
        product(packed, a.key_group_bytes, a.n_seen, a.head_dim, queries, score_of);
        for (int c = 0; c < nc; c++) {
            isa_.soft_max(a.n_seen, score_of[c], param(op, 0), score_of[c]);
            std::fill(score_of[c] + a.n_seen, score_of[c] + a.columns, 0.0f);
            isa_.quantize(score_of[c], a.columns, BYTES_32, 0, a.columns / 32, weights, nc, c);
        }
        product(packed + a.key_groups * a.key_group_bytes, a.value_group_bytes, a.value_dim, a.columns, weights, out);
    }
}

} // namespace edgespec
