// What the larger steps of an Executor do, products and attention: the part of one of n threads.
#include "graph.h"
#include "product.h"
#include "share.h"
#include "tensor.h"

#include <math.h>

#include <algorithm>

namespace edgespec {

using namespace ggml;

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

// Of weights as they are in the file: routers, which are small. All of this thread's rows go by for a tile of tokens:
// they stay in cache, as those of a long prompt would not.
void Executor::float_matmul(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *w = op->src[0], *x = op->src[1];
    const int64_t rows = w->ne[1], tokens = op->ne[1];
    const Share share(rows * op->ne[2] * op->ne[3], thread, n);
    for (int64_t unit = share.first; unit < share.last;) {
        const int64_t first = unit % rows, last = std::min(rows, first + share.last - unit);
        const int64_t i2 = unit / rows % op->ne[2], i3 = unit / rows / op->ne[2];
        const int64_t w2 = i2 / (op->ne[2] / w->ne[2]), w3 = i3 / (op->ne[3] / w->ne[3]);
        for (int64_t begin = 0; begin < tokens; begin += MAX_TILE) {
            const int nc = (int)std::min<int64_t>(MAX_TILE, tokens - begin);
            const float *columns[MAX_TILE];
            float *y[MAX_TILE];
            for (int c = 0; c < nc; c++) {
                columns[c] = at<const float>(x, begin + c, i2, i3);
                y[c] = at<float>(op, begin + c, i2, i3);
            }
            // Several sums at once do not wait for each other: those of many tokens, else those of many rows.
            if (nc >= MAX_TILE / 2) {
                for (int64_t r = first; r < last; r++) {
                    float sums[MAX_TILE];
                    isa_.dots(w->ne[0], at<const float>(w, r, w2, w3), columns, nc, sums);
                    for (int c = 0; c < nc; c++) {
                        y[c][r] = sums[c];
                    }
                }
                continue;
            }
            for (int64_t r = first; r < last; r += MAX_TILE) {
                const int count = (int)std::min<int64_t>(MAX_TILE, last - r);
                const float *weights[MAX_TILE];
                for (int i = 0; i < count; i++) {
                    weights[i] = at<const float>(w, r + i, w2, w3);
                }
                for (int c = 0; c < nc; c++) {
                    isa_.dots(w->ne[0], columns[c], weights, count, y[c] + r);
                }
            }
        }
        unit += last - first;
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
        unit.value_dim = a.value_dim;
        unit.rows = (int)(tile.last - tile.first);
        unit.blocks = a.views->blocks();
        unit.k = at<const char>(k, 0, cache_head);
        unit.v = at<const char>(v, 0, cache_head);
        unit.is_q8 = k->type == TYPE_Q8_0;
        unit.k_stride = (int64_t)k->nb[1];
        unit.v_stride = (int64_t)v->nb[1];
        unit.scale = param(op, 0);
        unit.soft_cap = param(op, 2);
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

    AttentionState state(float *memory) const { return AttentionState::at(memory, unit.value_dim, unit.rows); }

    // The outputs; zeros for a token that sees nothing. A head's sink is a score that takes weight from the others.
    void write(const Isa &isa, const AttentionState &total, const Tensor *op) const {
        const float *const sinks = op->src[4] ? (const float *)op->src[4]->data : nullptr;
        for (int r = 0; r < unit.rows; r++) {
            float factor = total.sum[r] > 0 ? 1 / total.sum[r] : 0;
            if (sinks && total.sum[r] > 0) {
                const float sink = sinks[head[r]], max = std::max(total.max[r], sink);
                const float weight = expf(total.max[r] - max);
                factor = weight / (total.sum[r] * weight + expf(sink - max));
            }
            isa.scale(unit.value_dim, total.out + r * unit.value_dim, factor, 0, at<float>(op, head[r], token[r]));
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
            isa_.merge(a.value_dim, rows.unit.rows, part, total);
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
            isa_.merge(a.value_dim, rows.unit.rows, of_segment(s), of_segment(0));
        }
        rows.write(isa_, of_segment(0), step.op);
    }
}

} // namespace edgespec
