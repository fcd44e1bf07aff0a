// Products with several matrices beside each other: which rows go through which, and the steps of an Executor.
#include "experts.h"
#include "graph.h"
#include "product.h"
#include "share.h"
#include "tensor.h"

namespace edgespec {

using namespace ggml;

Routing::Routing(const Tensor *product) : product_(product), n_matrices_(product->src[0]->ne[2]) {
    const size_t rows = (size_t)ggml::n_rows(product), active = std::min(rows, (size_t)n_matrices_);
    rows_.resize(rows);
    ends_.resize((size_t)n_matrices_);
    first_tiles_.resize(active + 1);
    tiles_.resize(rows / MAX_TILE + active + 1);
}

bool Routing::fits(const Tensor *product) const {
    return product->op == OP_MUL_MAT_ID && product_->op == OP_MUL_MAT_ID && product->src[2] == product_->src[2] &&
           product->src[0]->ne[2] == n_matrices_;
}

int32_t Routing::matrix_of(int64_t row) const {
    const int64_t i1 = row % product_->ne[1], i2 = row / product_->ne[1];
    if (product_->op == OP_MUL_MAT) { // rows of the product repeat matrices as ggml does
        return (int32_t)(i2 % product_->ne[2] / (product_->ne[2] / n_matrices_));
    }
    const int32_t expert = at<const int32_t>(product_->src[2], i2)[i1];
    return expert >= 0 && expert < n_matrices_ ? expert : -1;
}

const float *Routing::input(const Tensor *product, int64_t row) const {
    const int64_t i1 = row % product->ne[1], i2 = row / product->ne[1] % product->ne[2];
    const int64_t i3 = row / (product->ne[1] * product->ne[2]);
    const Tensor *x = product->src[1];
    return at<const float>(x, i1 % x->ne[1], i2, i3); // experts may share a token's row
}

// A counting sort; rows of a matrix stay in their order.
void Routing::sort() {
    const int64_t n = n_rows();
    std::fill(ends_.begin(), ends_.end(), 0);
    for (int64_t row = 0; row < n; row++) {
        const int32_t matrix = matrix_of(row);
        if (matrix >= 0) {
            ends_[(size_t)matrix]++;
        }
    }
    int32_t end = 0;
    n_tiles_ = n_active_ = 0;
    for (int64_t matrix = 0; matrix < n_matrices_; matrix++) {
        const int32_t count = ends_[(size_t)matrix], first = end;
        ends_[(size_t)matrix] = first; // grows to the end while the slots are filled
        end += count;
        if (count == 0) {
            continue;
        }
        first_tiles_[(size_t)n_active_++] = (int32_t)n_tiles_;
        const int64_t tiles = edgespec::n_tiles(count, count < wide_from_ ? MAX_TILE : WIDE_TILE);
        for (int64_t t = 0; t < tiles; t++) {
            const int32_t begin = (int32_t)tile_begin(count, tiles, t), last = (int32_t)tile_begin(count, tiles, t + 1);
            tiles_[(size_t)n_tiles_++] = {(int32_t)matrix, first + begin, last - begin};
        }
    }
    first_tiles_[(size_t)n_active_] = (int32_t)n_tiles_;
    for (int64_t row = 0; row < n; row++) {
        const int32_t matrix = matrix_of(row);
        if (matrix >= 0) {
            rows_[(size_t)ends_[(size_t)matrix]++] = (int32_t)row;
        }
    }
}

void Executor::route(const Step &step, int thread, int) {
    if (thread == 0) {
        routings_[step.routing].sort();
    }
}

void Executor::quantize_routed(const Step &step, int thread, int n) {
    const Routing &routing = routings_[step.routing];
    const Acts acts = FORMATS[find_type(step.op->src[0]->type)].acts;
    const int64_t columns = step.op->src[1]->ne[0], blocks = columns / act_columns(acts);
    const int64_t units = routing.n_tiles() * blocks, slot_bytes = n_steps(columns) * record_bytes(acts, 1);
    const Share share(units, thread, n);
    for (int64_t unit = share.first; unit < share.last;) {
        const Routing::Tile &tile = routing.tile(unit / blocks);
        const int64_t first = unit % blocks, end = std::min(blocks, first + share.last - unit);
        for (int c = 0; c < tile.n; c++) {
            const int64_t row = routing.row(tile.first + c);
            isa_.quantize(routing.input(step.op, row), columns, acts, first, end, acts_ + tile.first * slot_bytes,
                          tile.n, c);
        }
        unit += end - first;
    }
}

// Each matrix that has rows is cut into chunks. Threads take them one after another: matrices with many rows take
// longer.
void Executor::matmul_routed(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *w = op->src[0];
    const Routing &routing = routings_[step.routing];
    const Type type = find_type(w->type);
    const int64_t groups = n_groups(w->ne[1], isa_.layout.lanes);
    const int64_t matrix_bytes = groups * group_bytes(type, w->ne[0], isa_.layout.lanes);
    const int64_t active = std::max<int64_t>(1, routing.n_active());
    const int64_t chunks = std::min(groups, std::max<int64_t>((8 * n + active - 1) / active, matrix_bytes >> 17));
    each_chunk(&counters_[step.index], routing.n_active() * chunks, thread, n, [&](int64_t unit) {
        const int64_t i = unit / chunks, chunk = unit % chunks;
        const int32_t matrix = routing.tile(routing.first_tile(i)).matrix;
        const Product product = {isa_,     prefetch_, type,    w->ne[1],
                                 w->ne[0], 0,         packed_data(w) + matrix * matrix_bytes,
                                 acts_,    (float *)op->data};
        for (int64_t t = routing.first_tile(i); t < routing.first_tile(i + 1); t++) {
            const Routing::Tile &tile = routing.tile(t);
            float *y[WIDE_TILE];
            for (int c = 0; c < tile.n; c++) {
                y[c] = product.y + (int64_t)routing.row(tile.first + c) * product.rows;
            }
            product.multiply(chunk, chunks, product.tile(tile.first), tile.n, y);
            if (step.fused) {
                const int64_t first = product.first_row(chunk, chunks), last = product.first_row(chunk + 1, chunks);
                for (int c = 0; c < tile.n; c++) {
                    isa_.add(last - first, y[c] + first, at<const float>(step.other, matrix) + first,
                             row<float>(step.fused, routing.row(tile.first + c), step.fused) + first);
                }
            }
        }
    });
}

} // namespace edgespec
