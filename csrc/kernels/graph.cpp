// Which operations are run, and in which steps. What a step does: operations.cpp.
#include "graph.h"
#include "tensor.h"

#include <algorithm>

namespace edgespec {

using namespace ggml;

namespace {

bool same_shape(const Tensor *a, const Tensor *b) { return !memcmp(a->ne, b->ne, sizeof a->ne); }
bool is_view(const Tensor *t) {
    return t->op == OP_NONE || t->op == OP_RESHAPE || t->op == OP_VIEW || t->op == OP_PERMUTE || t->op == OP_TRANSPOSE;
}
bool is_empty(const Tensor *t) { return t->ne[0] * n_rows(t) == 0; }
bool is_rows(const Tensor *t, int type, size_t size) { return t && t->type == type && t->nb[0] == size; }
bool is_float_rows(const Tensor *t) { return is_rows(t, TYPE_F32, 4); }

bool repeats_over(const Tensor *small, const Tensor *shape) {
    const auto divides = [](int64_t a, int64_t b) { return a == 0 ? b == 0 : b % a == 0; }; // a batch may want no logits
    return small->ne[0] == shape->ne[0] && divides(small->ne[1], shape->ne[1]) && divides(small->ne[2], shape->ne[2]) &&
           divides(small->ne[3], shape->ne[3]);
}

// Memory from the first to past the last byte of a tensor.
struct Range {
    const char *begin, *end;
    explicit Range(const Tensor *t) : begin((const char *)t->data), end(begin + 1) {
        for (int i = 0; i < 4; i++) {
            end += (t->ne[i] - 1) * (int64_t)t->nb[i];
        }
        end += t->nb[0] - 1;
    }
    bool overlaps(const Range &other) const { return begin < other.end && other.begin < end; }
};

bool on_host(const Tensor *op, const Ggml &ggml, int from = 0) {
    for (int i = from; i < 10; i++) {
        const Tensor *src = op->src[i];
        if (src && src->buffer && !ggml.backend_buft_is_host(src->buffer->buft)) {
            return false;
        }
    }
    return true;
}

} // namespace

bool can_pack(const Tensor *w) {
    const Type type = find_type(w->type);
    return type != N_TYPES && w->ne[2] == 1 && w->ne[3] == 1 && w->ne[1] >= 1 && w->ne[0] >= 32 &&
           w->ne[0] % FORMATS[type].block == 0;
}

bool is_packed_matmul(const Tensor *op, const BufferType *packed, const Ggml &ggml) {
    if (op->op != OP_MUL_MAT) {
        return false;
    }
    const Tensor *w = op->src[0], *x = op->src[1];
    return w->buffer && w->buffer->buft == packed && !w->view_src && can_pack(w) && is_float_rows(x) &&
           is_float_rows(op) && op->nb[1] == (size_t)op->ne[0] * 4 && op->nb[2] == op->nb[1] * (size_t)op->ne[1] &&
           op->nb[3] == op->nb[2] * (size_t)op->ne[2] && on_host(op, ggml, 1);
}

bool can_run(const Tensor *op, const Ggml &ggml) {
    const Tensor *a = op->src[0], *b = op->src[1];
    if (is_view(op)) {
        return true;
    }
    if (!a || !on_host(op, ggml)) {
        return false;
    }
    switch (op->op) {
    case OP_ADD:
    case OP_MUL:
        return is_float_rows(op) && is_float_rows(a) && is_float_rows(b) && same_shape(op, a) && repeats_over(b, op);
    case OP_RMS_NORM:
        return is_float_rows(op) && is_float_rows(a);
    case OP_SCALE:
        return is_float_rows(op) && is_float_rows(a);
    case OP_GLU:
        return (op->op_params[0] == GLU_SWIGLU || op->op_params[0] == GLU_GEGLU) && is_float_rows(op) &&
               is_float_rows(a) && (b ? is_float_rows(b) && same_shape(a, b) : true);
    case OP_ROPE:
        return is_float_rows(op) && is_float_rows(a) && is_rows(b, TYPE_I32, 4) && b->op == OP_NONE && op->ne[3] == 1 &&
               (op->op_params[2] == ROPE_NORMAL || op->op_params[2] == ROPE_NEOX) && param(op, 7) == 0 &&
               op->op_params[15] == 0 && (!op->src[2] || (is_float_rows(op->src[2]) && op->src[2]->op == OP_NONE));
    case OP_SET_ROWS:
        return is_rows(op, TYPE_F16, 2) && is_float_rows(a) && (is_rows(b, TYPE_I64, 8) || is_rows(b, TYPE_I32, 4)) &&
               a->ne[2] == 1 && a->ne[3] == 1 && op->ne[2] == 1 && op->ne[3] == 1;
    case OP_GET_ROWS:
        return is_float_rows(op) && is_float_rows(a) && is_rows(b, TYPE_I32, 4) && a->ne[2] == 1 && a->ne[3] == 1 &&
               n_rows(b) == 1;
    case OP_FLASH_ATTN_EXT: {
        const Tensor *q = a, *k = b, *v = op->src[2], *mask = op->src[3];
        const float max_bias = param(op, 1), soft_cap = param(op, 2);
        return is_float_rows(op) && is_float_rows(q) && is_rows(k, TYPE_F16, 2) && is_rows(v, TYPE_F16, 2) &&
               is_rows(mask, TYPE_F16, 2) && mask->op == OP_NONE && mask->ne[0] == k->ne[1] &&
               mask->ne[1] >= q->ne[1] && !op->src[4] && max_bias == 0 && soft_cap == 0 && q->ne[3] == 1 &&
               k->ne[3] == 1 && mask->ne[2] == 1 && mask->ne[3] == 1 && q->ne[0] == k->ne[0] && v->ne[0] == k->ne[0] &&
               q->ne[0] % 16 == 0 && q->ne[0] <= MAX_HEAD_DIM && k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0;
    }
    default:
        return false;
    }
}

// ---- planning ----

bool Executor::plan(const std::vector<Tensor *> &nodes) {
    steps_.clear();
    angles_.clear();
    attentions_.clear();
    tiles_.clear();
    n_views_ = 0;
    size_t acts = 0, states = 0, angles = 0;
    const Tensor *quantized = nullptr; // what acts_ holds, and as what
    Acts act_kind = BYTES_32;

    std::vector<const Tensor *> ops;
    for (const Tensor *node : nodes) {
        if (!is_view(node) && !is_empty(node) && (node->flags & FLAG_COMPUTE)) {
            ops.push_back(node);
        }
    }
    learn_cells(ops);
    for (size_t i = 0; i < ops.size(); i++) {
        const Tensor *op = ops[i], *next = i + 1 < ops.size() ? ops[i + 1] : nullptr;
        switch (op->op) {
        case OP_MUL_MAT: {
            const Tensor *x = op->src[1];
            const Format &format = FORMATS[find_type(op->src[0]->type)];
            if (quantized != x || act_kind != format.acts) {
                steps_.emplace_back(&Executor::quantize, op);
                quantized = x;
                act_kind = format.acts;
            }
            acts = std::max(acts, (size_t)(n_steps(x->ne[0]) * record_bytes(format.acts, n_rows(x))));
            steps_.emplace_back(&Executor::matmul, op);
            // The sum is written together with the product. Nothing else can live in its memory by now
            // but x, and x has been quantized.
            if (next && next->op == OP_ADD && same_shape(next, op) && (next->src[0] == op || next->src[1] == op)) {
                const Tensor *other = next->src[next->src[0] == op];
                if (!Range(other).overlaps(Range(op))) { // not the product again
                    steps_.back().fused = next;
                    steps_.back().other = other;
                    i++;
                }
            }
            break;
        }
        case OP_RMS_NORM:
            steps_.emplace_back(&Executor::rms_norm, op);
            if (next && next->op == OP_MUL && next->src[0] == op &&
                (next->data == op->data || !Range(next).overlaps(Range(op->src[0])))) {
                steps_.back().fused = next;
                steps_.back().other = next->src[1];
                i++;
            }
            break;
        case OP_ADD:
        case OP_MUL:
            steps_.emplace_back(&Executor::binary, op);
            break;
        case OP_SCALE:
            steps_.emplace_back(&Executor::scale, op);
            break;
        case OP_GLU:
            steps_.emplace_back(&Executor::glu, op);
            break;
        case OP_ROPE: {
            size_t a = 0;
            while (a < angles_.size() &&
                   (angles_[a].op->src[1] != op->src[1] || angles_[a].op->src[2] != op->src[2] ||
                    memcmp(angles_[a].op->op_params, op->op_params, sizeof op->op_params))) {
                a++;
            }
            if (a == angles_.size()) {
                angles_.push_back({op, nullptr, nullptr});
                angles += (size_t)(op->ne[2] * op->op_params[1]);
            }
            steps_.emplace_back(&Executor::rope, op);
            steps_.back().index = a;
            break;
        }
        case OP_SET_ROWS:
            steps_.emplace_back(&Executor::set_rows, op);
            break;
        case OP_GET_ROWS:
            steps_.emplace_back(&Executor::get_rows, op);
            break;
        case OP_FLASH_ATTN_EXT: {
            Attention &a = attentions_.emplace_back(op, find_views(op));
            cut(a);
            const int64_t n = a.by_segment ? a.n_units() : 2 * n_threads;
            states = std::max(states, (size_t)n * a.state_floats());
            steps_.emplace_back(&Executor::attend, op);
            steps_.back().attention = attentions_.size() - 1;
            if (a.by_segment) {
                steps_.emplace_back(&Executor::merge, op);
                steps_.back().attention = attentions_.size() - 1;
            }
            break;
        }
        default:
            return false;
        }
    }
    const size_t n_counters = steps_.size() * (size_t)n_threads;
    if (n_counters_ < n_counters) { // atomics cannot move
        n_counters_ = n_counters;
        counters_ = std::make_unique<std::atomic<int64_t>[]>(n_counters_);
    }
    for (size_t i = 0; i < n_counters; i++) {
        counters_[i].store(0, std::memory_order_relaxed);
    }
    for (size_t i = 0; i < steps_.size(); i++) {
        if (steps_[i].run != &Executor::rope) {
            steps_[i].index = i * (size_t)n_threads;
        }
    }
    const size_t acts_size = (acts + 127) / 64 * 64, size = 64 + acts_size + 4 * (states + angles);
    if (memory_size_ < size) {
        memory_.reset(); // first, so that both are never held
        memory_size_ = 0;
        memory_.reset(new char[size]);
        memory_size_ = size;
    }
    char *p = (char *)(((uintptr_t)memory_.get() + 63) & ~(uintptr_t)63);
    acts_ = (int8_t *)p;
    states_ = (float *)(p + acts_size);
    float *next_angles = states_ + states;
    for (Angles &a : angles_) {
        const int64_t n = a.op->ne[2] * a.op->op_params[1] / 2;
        a.cosines = next_angles;
        a.sines = next_angles + n;
        next_angles += 2 * n;
    }
    return true;
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
    for (const Tensor *op : ops) {
        if (!positions_ && (op->op == OP_SET_ROWS || op->op == OP_ROPE)) {
            positions_ = rotation_of(op);
        }
        if (op->op == OP_FLASH_ATTN_EXT) {
            attended.push_back(op->src[1]->data);
        }
    }
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
        const auto group = std::find_if(written.begin(), written.end(), [&](const auto &w) { return w.first == index; });
        if (!cells) {
            cells = group == written.end() ? &cells_.emplace_back(op->ne[1]) : group->second;
            cells->add_layer(op);
        }
        if (group == written.end()) {
            written.push_back({index, cells});
            const bool fits = positions_ && positions_->type == TYPE_I32 && positions_->ne[0] == index->ne[0];
            cells->write(index, fits ? (const int32_t *)positions_->data : nullptr);
        }
    }
}

const Views *Executor::find_views(const Tensor *attention) {
    const Tensor *k = attention->src[1], *mask = attention->src[3];
    const int64_t n = attention->src[0]->ne[1];
    Cells *const known = cells_of(k), *const cells = known && known->size() >= k->ne[1] ? known : nullptr;
    for (size_t i = 0; i < n_views_; i++) {
        if (views_[i].mask == mask && views_[i].cells == cells) {
            return &views_[i];
        }
    }
    if (n_views_ == views_.size()) {
        views_.emplace_back();
    }
    Views &views = views_[n_views_++];
    const bool fits = positions_ && positions_->type == TYPE_I32 && positions_->ne[0] == n;
    views.read(mask, n, cells, fits ? (const int32_t *)positions_->data : nullptr);
    return &views;
}

// Cut the rows into tiles of about the same size, between tokens where that fits.
void Executor::cut(Attention &a) {
    for (const Attention &other : attentions_) {
        if (&other != &a && other.views == a.views && other.gqa == a.gqa && other.n_heads == a.n_heads) {
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

int Executor::compute(Graph *graph) {
    std::vector<Tensor *> nodes((size_t)ggml_.graph_n_nodes(graph));
    for (size_t i = 0; i < nodes.size(); i++) {
        nodes[i] = ggml_.graph_node(graph, (int)i);
    }
    return compute(nodes);
}

int Executor::compute(const std::vector<Tensor *> &nodes) {
    if (!plan(nodes)) {
        return STATUS_FAILED;
    }
    n_wanted_.store(steps_.size(), std::memory_order_relaxed);
    run_team(n_threads, [this](Team &team, int thread) { run(team, thread); });
    const bool done = n_wanted_.load(std::memory_order_relaxed) == steps_.size();
    for (Cells &cells : cells_) {
        cells.settle(done);
    }
    return done ? STATUS_SUCCESS : STATUS_ABORTED;
}

void Executor::run(Team &team, int thread) {
    if (!angles_.empty()) {
        compute_angles(thread, team.size()); // the first barrier comes before the first rotation
        team.barrier();
    }
    // An abort says after which step to stop: a flag could be seen by one thread a barrier earlier than by another.
    for (size_t i = 0; i < n_wanted_.load(std::memory_order_relaxed); i++) {
        if (thread == 0 && i + 1 < steps_.size() && abort && abort(abort_data)) {
            n_wanted_.store(i + 1, std::memory_order_relaxed);
        }
        (this->*steps_[i].run)(steps_[i], thread, team.size());
        team.barrier();
    }
}

Attention::Attention(const Tensor *op, const Views *v) : views(v) {
    const Tensor *q = op->src[0], *k = op->src[1];
    head_dim = q->ne[0];
    n_heads = k->ne[2];
    gqa = q->ne[2] / k->ne[2];
    n_rows = q->ne[1] * gqa;
}

} // namespace edgespec
