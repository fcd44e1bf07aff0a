// How attention is cut into work: what tokens see of the cache, and tiles of rows. What its steps do: operations.cpp.
#include "graph.h"
#include "tensor.h"

#include <algorithm>

namespace edgespec {

using namespace ggml;

Attention::Attention(const Tensor *op, const Views *v) : views(v) {
    const Tensor *q = op->src[0], *k = op->src[1];
    head_dim = q->ne[0];
    value_dim = op->src[2]->ne[0];
    n_heads = k->ne[2];
    gqa = q->ne[2] / k->ne[2];
    n_rows = q->ne[1] * gqa;
}

void Executor::plan_attention(Planning &p, const Tensor *op) {
    Attention &a = attentions_.emplace_back(op, find_views(op));
    cut(a);
    const int64_t n = a.by_segment ? a.n_units() : 2 * n_threads;
    p.states = std::max(p.states, (size_t)n * a.state_floats());
    steps_.emplace_back(&Executor::attend, op);
    steps_.back().attention = attentions_.size() - 1;
    if (a.by_segment) {
        steps_.emplace_back(&Executor::merge, op);
        steps_.back().attention = attentions_.size() - 1;
    }
}

// Of the cache that begins where `keys` do; nullptr: not known.
Cells *Executor::cells_of(const Tensor *keys) {
    for (Cells &cells : cells_) {
        if (cells.has_layer(keys->data)) {
            return &cells;
        }
    }
    return nullptr;
}

// Which positions the graph writes into which cells. Both are inputs of the graph: they can be read before it runs.
void Executor::learn_cells(const std::vector<const Tensor *> &ops) {
    const auto is_input = [](const Tensor *t) { return t && t->op == OP_NONE; };
    const auto rotation_of = [&](const Tensor *keys) { // nullptr: none
        for (int i = 0; i < 8 && keys && keys->op != OP_ROPE; i++) {
            keys = keys->src[0];
        }
        return keys && keys->op == OP_ROPE && is_input(keys->src[1]) ? keys->src[1] : nullptr;
    };
    for (Cells &cells : cells_) {
        cells.settle(false); // a graph that could not be planned was not run
    }
    positions_ = nullptr;
    std::vector<const void *> attended;
    const Tensor *looked_up = nullptr; // positions of a model without rotations: each has a row that is added
    for (const Tensor *op : ops) {
        const Tensor *const added = op->op == OP_ADD ? op->src[1] : nullptr;
        if (!looked_up && added && added->op == OP_GET_ROWS && is_input(added->src[0]) && is_input(added->src[1])) {
            looked_up = added->src[1];
        }
        if (!positions_ && (op->op == OP_SET_ROWS || op->op == OP_ROPE)) {
            positions_ = rotation_of(op);
        }
        if (op->op == OP_FLASH_ATTN_EXT) {
            attended.push_back(op->src[1]->data);
        }
    }
    positions_ = positions_ ? positions_ : looked_up;
    std::vector<std::pair<const Tensor *, Cells *>> written; // the layers of a cache share the list of cells
    for (const Tensor *op : ops) {
        const bool holds_keys =
            op->op == OP_SET_ROWS && is_input(op->src[1]) &&
            (rotation_of(op) || std::find(attended.begin(), attended.end(), op->data) != attended.end());
        if (!holds_keys) {
            continue;
        }
        const Tensor *index = op->src[1];
        Cells *cells = cells_of(op);
        if (cells && cells->size() != op->ne[1]) { // another cache lies there now
            cells_.remove_if([&](const Cells &old) { return &old == cells; });
            cells = nullptr;
        }
        const auto group = std::find_if(written.begin(), written.end(), [&](const auto &w) { return w.first == index; });
        if (!cells) {
            cells = group == written.end() ? &cells_.emplace_back(op->ne[1]) : group->second;
            cells->add_layer(op);
        }
        if (group == written.end()) {
            written.push_back({index, cells});
            const bool fits = knows_positions(index->ne[0]);
            cells->write(index, fits ? (const int32_t *)positions_->data : nullptr);
        }
    }
}

// Whether positions_ are those of n tokens. Where they have four parts, the first is the position in the sequence.
bool Executor::knows_positions(int64_t n) const {
    return positions_ && positions_->type == TYPE_I32 && (positions_->ne[0] == n || positions_->ne[0] == 4 * n);
}

const Views *Executor::find_views(const Tensor *attention) {
    const Tensor *k = attention->src[1], *mask = attention->src[3];
    const int64_t n = attention->src[0]->ne[1];
    Cells *const known = cells_of(k), *const cells = known && known->size() >= k->ne[1] ? known : nullptr;
    for (size_t i = 0; i < n_views_; i++) {
        if (mask ? views_[i].mask == mask && views_[i].cells == cells : views_[i].n_seen == k->ne[1]) {
            return &views_[i];
        }
    }
    if (n_views_ == views_.size()) {
        views_.emplace_back();
    }
    Views &views = views_[n_views_++];
    if (!mask) {
        views.see_all(k->ne[1]);
        return &views;
    }
    const bool fits = knows_positions(n);
    views.read(mask, n, cells, fits ? (const int32_t *)positions_->data : nullptr);
    return &views;
}

// Cut the rows into tiles of about the same size, between tokens where that fits.
void Executor::cut(Attention &a) {
    for (const Attention &other : attentions_) {
        if (&other != &a && other.views == a.views && other.gqa == a.gqa && other.n_heads == a.n_heads &&
            other.n_rows == a.n_rows) {
            a.n_tiles = other.n_tiles;
            a.n_pieces = other.n_pieces;
            a.first_tile = other.first_tile;
            a.by_segment = other.by_segment;
            return;
        }
    }
    a.first_tile = tiles_.size();
    a.n_tiles = (a.n_rows + ATTN_ROWS - 1) / ATTN_ROWS;
    const auto bound = [&](int64_t tile, bool between) {
        const int64_t row = a.n_rows * tile / a.n_tiles;
        return between ? (row + a.gqa / 2) / a.gqa * a.gqa : row;
    };
    bool between = true;
    for (int64_t t = 0; t < a.n_tiles; t++) {
        const int64_t n = bound(t + 1, true) - bound(t, true);
        between = between && n > 0 && n <= ATTN_ROWS;
    }
    a.n_pieces = 0;
    for (int64_t t = 0; t < a.n_tiles; t++) {
        Tile tile = {bound(t, between), bound(t + 1, between), INT64_MAX, 0, a.n_pieces};
        for (int64_t token = tile.first / a.gqa; token <= (tile.last - 1) / a.gqa; token++) {
            const Views::View &view = a.views->of(token);
            tile.first_segment = std::min(tile.first_segment, view.start / ATTN_SEGMENT);
            tile.last_segment = std::max(tile.last_segment, (view.end + ATTN_SEGMENT - 1) / ATTN_SEGMENT);
        }
        tile.last_segment = std::max(tile.last_segment, tile.first_segment + 1); // who sees nothing gets zeros
        a.n_pieces += tile.last_segment - tile.first_segment;
        tiles_.push_back(tile);
    }
    a.by_segment = a.n_pieces > a.n_tiles && a.n_heads * a.n_tiles < 4 * n_threads;
}

} // namespace edgespec
