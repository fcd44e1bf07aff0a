// What each step of an Executor does: the part of one of n threads.
#include "graph.h"
#include "product.h"
#include "tensor.h"

#include <math.h>

#include <algorithm>

namespace edgespec {

using namespace ggml;

namespace {

// This thread's share [first, last) of n units.
struct Share {
    int64_t first, last;
    Share(int64_t units, int thread, int n) : first(units * thread / n), last(units * (thread + 1) / n) {}
};

// Calls f(row, first column, last column) for this thread's part of the rows; few rows are cut in pieces.
template <class F> void each_part(const Tensor *t, int thread, int n, const F &f) {
    const int64_t rows = n_rows(t), columns = t->ne[0];
    const int64_t pieces = rows >= n || columns < 1024 ? 1 : n;
    const int64_t length = ((columns + pieces - 1) / pieces + 15) / 16 * 16;
    const Share share(rows * pieces, thread, n);
    for (int64_t unit = share.first; unit < share.last; unit++) {
        const int64_t first = unit % pieces * length, last = std::min(columns, first + length);
        if (first < last) {
            f(unit / pieces, first, last);
        }
    }
}

} // namespace

// ---- products ----

void Executor::quantize(const Step &step, int thread, int n) {
    const Tensor *x = step.op->src[1];
    const Acts acts = FORMATS[find_type(step.op->src[0]->type)].acts;
    const int64_t columns = x->ne[0], tokens = n_rows(x), blocks = columns / act_columns(acts), tiles = n_tiles(tokens);
    // By blocks, for all tokens of a tile: those are neighbours in the packed activations, and threads that
    // write to the same lines of cache wait for each other (0.75 ms of 26 for 8 tokens).
    const Share share(tiles * blocks, thread, n);
    for (int64_t unit = share.first; unit < share.last;) {
        const int64_t tile = unit / blocks, first = unit % blocks, last = std::min(blocks, first + share.last - unit);
        const int64_t begin = tile_begin(tokens, tiles, tile), end = tile_begin(tokens, tiles, tile + 1);
        for (int64_t c = begin; c < end; c++) {
            isa_.quantize(column(x, c), columns, acts, first, last,
                          acts_ + begin * n_steps(columns) * record_bytes(acts, 1), (int)(end - begin), (int)(c - begin));
        }
        unit += last - first;
    }
}

void Executor::matmul(const Step &step, int thread, int n) {
    const Tensor *w = step.op->src[0];
    const int64_t tokens = n_rows(step.op->src[1]);
    const Product product = {isa_,     prefetch_, find_type(w->type),         w->ne[1],
                             w->ne[0], tokens,    (const uint8_t *)w->data,   acts_,
                             (float *)step.op->data};
    const int64_t chunks = product.n_chunks(n);
    each_chunk(&counters_[step.index], chunks, thread, n, [&](int64_t chunk) {
        product.run(chunk, chunks);
        if (step.fused) {
            const int64_t first = product.first_row(chunk, chunks), last = product.first_row(chunk + 1, chunks);
            for (int64_t c = 0; c < tokens; c++) {
                isa_.add(last - first, product.y + c * product.rows + first,
                         row<const float>(step.other, c, step.fused) + first, row<float>(step.fused, c, step.fused) + first);
            }
        }
    });
}

// ---- rows ----

void Executor::rms_norm(const Step &step, int thread, int n) {
    const Tensor *x = step.op->src[0];
    const float eps = param(step.op, 0);
    const Share share(n_rows(x), thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        float *y = row<float>(step.op, r, step.op);
        isa_.rms_norm(x->ne[0], row<const float>(x, r, x), eps, y);
        if (step.fused) {
            isa_.mul(x->ne[0], y, row<const float>(step.other, r, x), row<float>(step.fused, r, x));
        }
    }
}

void Executor::binary(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *a = op->src[0], *b = op->src[1];
    const auto f = op->op == OP_ADD ? isa_.add : isa_.mul;
    each_part(op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
        f(last - first, row<const float>(a, r, op) + first, row<const float>(b, r, op) + first,
          row<float>(op, r, op) + first);
    });
}

void Executor::scale(const Step &step, int thread, int n) {
    const Tensor *op = step.op;
    each_part(op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
        isa_.scale(last - first, row<const float>(op->src[0], r, op) + first, param(op, 0), param(op, 1),
                   row<float>(op, r, op) + first);
    });
}

void Executor::glu(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0], *g = op->src[1];
    const auto f = op->op_params[0] == GLU_SWIGLU ? isa_.silu_mul : isa_.gelu_mul;
    // Without a second operand both are halves of the first, in the order that `swapped` says.
    const int64_t half = x->ne[0] / 2, swapped = op->op_params[1];
    each_part(op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
        const float *a = row<const float>(x, r, x), *b = g ? row<const float>(g, r, g) : a;
        if (!g) {
            (swapped ? a : b) += half;
        }
        f(last - first, a + first, b + first, row<float>(op, r, op) + first);
    });
}

void Executor::compute_angles(int thread, int n) {
    for (const Angles &angles : angles_) {
        const Tensor *op = angles.op;
        const float *factors = op->src[2] ? (const float *)op->src[2]->data : nullptr;
        const int64_t half = op->op_params[1] / 2;
        const float step = powf(param(op, 5), -2.0f / (float)op->op_params[1]);
        const Share share(op->ne[2], thread, n);
        for (int64_t t = share.first; t < share.last; t++) {
            float theta = (float)((const int32_t *)op->src[1]->data)[t];
            for (int64_t i = 0; i < half; i++, theta *= step) {
                const float angle = param(op, 6) * (factors ? theta / factors[i] : theta);
                angles.cosines[t * half + i] = cosf(angle) * param(op, 8);
                angles.sines[t * half + i] = sinf(angle) * param(op, 8);
            }
        }
    }
}

void Executor::rope(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0];
    const Angles &angles = angles_[step.index];
    const int64_t n_dims = op->op_params[1];
    const Share share(n_rows(op), thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        const int64_t token = r / op->ne[1];
        const float *from = row<const float>(x, r, op);
        float *to = row<float>(op, r, op);
        isa_.rope(n_dims, op->op_params[2] == ROPE_NEOX, from, angles.cosines + token * n_dims / 2,
                  angles.sines + token * n_dims / 2, to);
        if (from != to) {
            memcpy(to + n_dims, from + n_dims, (size_t)(op->ne[0] - n_dims) * 4);
        }
    }
}

void Executor::set_rows(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0], *index = op->src[1];
    const Share share(x->ne[1], thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        const int64_t to = index->type == TYPE_I64 ? ((const int64_t *)index->data)[r] : ((const int32_t *)index->data)[r];
        isa_.to_half(x->ne[0], at<const float>(x, r), at<uint16_t>(op, to));
    }
}

void Executor::get_rows(const Step &step, int thread, int n) {
    const Tensor *op = step.op;
    const Share share(op->ne[1], thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        const int64_t from = ((const int32_t *)op->src[1]->data)[r];
        memcpy(at<float>(op, r), at<const float>(op->src[0], from), (size_t)op->ne[0] * 4);
    }
}

// ---- attention ----

namespace {

// A tile of queries: its unit, and the token and head of each row.
struct Rows {
    AttentionUnit unit;
    int64_t token[ATTN_ROWS], head[ATTN_ROWS];

    Rows(const Tensor *op, const Attention &a, const Tile &tile, int64_t cache_head) {
        const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
        unit.head_dim = a.head_dim;
        unit.rows = (int)(tile.last - tile.first);
        unit.blocks = a.views->blocks();
        unit.k = at<const char>(k, 0, cache_head);
        unit.v = at<const char>(v, 0, cache_head);
        unit.k_stride = (int64_t)k->nb[1];
        unit.v_stride = (int64_t)v->nb[1];
        unit.scale = param(op, 0);
        for (int r = 0; r < unit.rows; r++) {
            token[r] = (tile.first + r) / a.gqa;
            head[r] = cache_head * a.gqa + (tile.first + r) % a.gqa;
            const Views::View &view = a.views->of(token[r]);
            unit.q[r] = at<const float>(q, token[r], head[r]);
            unit.start[r] = view.start;
            unit.end[r] = view.end;
            unit.block_ids[r] = a.views->block_ids(token[r]);
            unit.mask[r] = a.views->is_biased ? at<const uint16_t>(mask, token[r]) : nullptr;
        }
    }

    AttentionState state(float *memory) const { return AttentionState::at(memory, unit.head_dim, unit.rows); }

    // The outputs; zeros for a token that sees nothing.
    void write(const Isa &isa, const AttentionState &total, const Tensor *op) const {
        for (int r = 0; r < unit.rows; r++) {
            isa.scale(unit.head_dim, total.out + r * unit.head_dim, total.sum[r] > 0 ? 1 / total.sum[r] : 0, 0,
                      at<float>(op, head[r], token[r]));
        }
    }
};

} // namespace

void Executor::attend(const Step &step, int thread, int) {
    const Attention &a = attentions_[step.attention];
    const Tile *const tiles = &tiles_[a.first_tile];
    const auto attend_segment = [&](const Rows &rows, int64_t s, const AttentionState &state) {
        isa_.attend(rows.unit, s * ATTN_SEGMENT, (s + 1) * ATTN_SEGMENT, state);
    };
    const int64_t n_units = a.n_units(), n = n_units / a.n_heads; // n for each head
    for (int64_t unit; (unit = counters_[step.index].fetch_add(1, std::memory_order_relaxed)) < n_units;) {
        if (a.by_segment) {
            const Tile *tile = tiles;
            while (tile->piece + tile->last_segment - tile->first_segment <= unit % n) {
                tile++;
            }
            const Rows rows(step.op, a, *tile, unit / n);
            attend_segment(rows, tile->first_segment + unit % n - tile->piece,
                           rows.state(states_ + (size_t)unit * a.state_floats()));
            continue;
        }
        const Tile &tile = tiles[unit % n];
        const Rows rows(step.op, a, tile, unit / n);
        float *memory = states_ + (size_t)thread * 2 * a.state_floats();
        const AttentionState total = rows.state(memory), part = rows.state(memory + a.state_floats());
        attend_segment(rows, tile.first_segment, total);
        for (int64_t s = tile.first_segment + 1; s < tile.last_segment; s++) {
            attend_segment(rows, s, part);
            isa_.merge(a.head_dim, rows.unit.rows, part, total);
        }
        rows.write(isa_, total, step.op);
    }
}

void Executor::merge(const Step &step, int thread, int n) {
    const Attention &a = attentions_[step.attention];
    const Share share(a.n_heads * a.n_tiles, thread, n);
    for (int64_t i = share.first; i < share.last; i++) {
        const int64_t cache_head = i / a.n_tiles;
        const Tile &tile = tiles_[a.first_tile + (size_t)(i % a.n_tiles)];
        const Rows rows(step.op, a, tile, cache_head);
        const auto of_segment = [&](int64_t s) {
            const int64_t unit = cache_head * a.n_pieces + tile.piece + s;
            return rows.state(states_ + (size_t)unit * a.state_floats());
        };
        for (int64_t s = 1; s < tile.last_segment - tile.first_segment; s++) {
            isa_.merge(a.head_dim, rows.unit.rows, of_segment(s), of_segment(0));
        }
        rows.write(isa_, of_segment(0), step.op);
    }
}

} // namespace edgespec
