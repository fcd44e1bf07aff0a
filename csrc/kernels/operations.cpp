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
    const int64_t columns = x->ne[0], tokens = n_rows(x), blocks = columns / act_columns(acts);
    const int64_t tiles = n_tiles(tokens, tile_size(wide_from_, acts, tokens));
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
    const Type type = find_type(w->type);
    const int64_t tokens = n_rows(step.op->src[1]);
    const Product product = {isa_,  prefetch_, type, w->ne[1], w->ne[0], tokens, packed_data(w),
                             acts_, (float *)step.op->data, tile_size(wide_from_, FORMATS[type].acts, tokens)};
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
        unit.cache = cache_format(k->type);
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

    // The first block of a segment that a row sees, of a head.
    BlockAhead ahead(const Tensor *op, int64_t segment, int64_t cache_head) const {
        const int64_t begin = segment * ATTN_SEGMENT;
        for (int r = 0; r < unit.rows; r++) {
            const int64_t first = unit.start[r] / ATTN_BLOCK, block = begin / ATTN_BLOCK;
            if (begin < unit.end[r] && block >= first) {
                return {unit.blocks + unit.block_ids[r][block - first], at<const char>(op->src[1], 0, cache_head),
                        at<const char>(op->src[2], 0, cache_head)};
            }
        }
        return {};
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

void Executor::attend(const Step &step, int thread, int n) {
    const Attention &a = attentions_[step.attention];
    const Tile *const tiles = &tiles_[a.first_tile];
    const auto attend_segment = [&](const Rows &rows, int64_t s, const AttentionState &state, const BlockAhead &ahead) {
        isa_.attend(rows.unit, s * ATTN_SEGMENT, (s + 1) * ATTN_SEGMENT, state, ahead);
    };
    if (a.by_segment) {
        // All heads of a segment one after another: their keys lie side by side.
        each_chunk(&counters_[step.index], a.n_units(), thread, n, [&](int64_t unit) {
            const int64_t head = unit % a.n_heads, piece = unit / a.n_heads;
            const Tile *tile = tiles;
            while (tile->piece + tile->last_segment - tile->first_segment <= piece) {
                tile++;
            }
            const Rows rows(step.op, a, *tile, head);
            const int64_t segment = tile->first_segment + piece - tile->piece;
            const bool is_last = head == a.n_heads - 1;
            attend_segment(rows, segment, rows.state(states_ + (size_t)unit * a.state_floats()),
                           rows.ahead(step.op, is_last ? segment + 1 : segment, is_last ? 0 : head + 1));
        });
        return;
    }
    float *const memory = states_ + (size_t)thread * 2 * a.state_floats();
    each_chunk(&counters_[step.index], a.n_units(), thread, n, [&](int64_t unit) {
        const Tile &tile = tiles[unit % a.n_tiles];
        const int64_t head = unit / a.n_tiles;
        const Rows rows(step.op, a, tile, head);
        const AttentionState total = rows.state(memory), part = rows.state(memory + a.state_floats());
        for (int64_t s = tile.first_segment; s < tile.last_segment; s++) {
            const bool is_first = s == tile.first_segment;
            attend_segment(rows, s, is_first ? total : part, rows.ahead(step.op, s + 1, head));
            if (!is_first) {
                isa_.merge(a.value_dim, rows.unit.rows, part, total);
            }
        }
        rows.write(isa_, total, step.op);
    });
}

void Executor::merge(const Step &step, int thread, int n) {
    const Attention &a = attentions_[step.attention];
    const Share share(a.n_heads * a.n_tiles, thread, n);
    for (int64_t i = share.first; i < share.last; i++) {
        const int64_t head = i / a.n_tiles;
        const Tile &tile = tiles_[a.first_tile + (size_t)(i % a.n_tiles)];
        const Rows rows(step.op, a, tile, head);
        const auto of_segment = [&](int64_t s) {
            const int64_t unit = (tile.piece + s) * a.n_heads + head;
            return rows.state(states_ + (size_t)unit * a.state_floats());
        };
        for (int64_t s = 1; s < tile.last_segment - tile.first_segment; s++) {
            isa_.merge(a.value_dim, rows.unit.rows, of_segment(s), of_segment(0));
        }
        rows.write(isa_, of_segment(0), step.op);
    }
}

} // namespace edgespec
