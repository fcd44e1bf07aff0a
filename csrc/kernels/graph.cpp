#include "graph.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <new>

namespace edgespec {

using namespace ggml;

// How an attention is cut into units: rows of queries that share a head of the cache x segments of the cache.
struct Executor::Attention {
    int64_t head_dim, n_heads, gqa, n_rows; // n_rows for each head of the cache
    int64_t n_kv, n_segments;
    int64_t n_tiles, tile_rows;
    bool by_segment; // too few tiles for the threads: segments are units too, merged in a second step
    int64_t n_units() const { return n_heads * n_tiles; }
    size_t state_floats() const { return AttentionState::n_floats(head_dim, (int)tile_rows); }
};

namespace {

template <class T> T *at(const Tensor *t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (T *)((char *)t->data + i1 * (int64_t)t->nb[1] + i2 * (int64_t)t->nb[2] + i3 * (int64_t)t->nb[3]);
}
int64_t n_rows(const Tensor *t) { return t->ne[1] * t->ne[2] * t->ne[3]; }
bool same_shape(const Tensor *a, const Tensor *b) { return !memcmp(a->ne, b->ne, sizeof a->ne); }
bool is_view(const Tensor *t) {
    return t->op == OP_NONE || t->op == OP_RESHAPE || t->op == OP_VIEW || t->op == OP_PERMUTE || t->op == OP_TRANSPOSE;
}
bool is_empty(const Tensor *t) { return t->ne[0] * n_rows(t) == 0; }
bool is_rows(const Tensor *t, int type, size_t size) { return t && t->type == type && t->nb[0] == size; }
bool is_float_rows(const Tensor *t) { return is_rows(t, TYPE_F32, 4); }

// Row `r` of all rows of t, in the order of ggml; rows of a smaller tensor repeat.
template <class T> T *row(const Tensor *t, int64_t r, const Tensor *shape) {
    const int64_t i1 = r % shape->ne[1], i2 = r / shape->ne[1] % shape->ne[2], i3 = r / (shape->ne[1] * shape->ne[2]);
    return at<T>(t, i1 % t->ne[1], i2 % t->ne[2], i3 % t->ne[3]);
}
bool repeats_over(const Tensor *small, const Tensor *shape) {
    const auto divides = [](int64_t a, int64_t b) { return a == 0 ? b == 0 : b % a == 0; }; // a batch may want no logits
    return small->ne[0] == shape->ne[0] && divides(small->ne[1], shape->ne[1]) && divides(small->ne[2], shape->ne[2]) &&
           divides(small->ne[3], shape->ne[3]);
}
float param(const Tensor *op, int i) {
    float x;
    memcpy(&x, &op->op_params[i], 4);
    return x;
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

bool on_host(const Tensor *op, const Ggml &ggml, int from = 0) {
    for (int i = from; i < 10; i++) {
        const Tensor *src = op->src[i];
        if (src && src->buffer && !ggml.backend_buft_is_host(src->buffer->buft)) {
            return false;
        }
    }
    return true;
}

const float *column(const Tensor *x, int64_t c) { return row<const float>(x, c, x); }

int64_t tile_begin(int64_t n, int64_t tiles, int64_t t) { return n * t / tiles; }
int64_t n_tiles(int64_t n) { return (n + MAX_TILE - 1) / MAX_TILE; }

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
               is_rows(mask, TYPE_F16, 2) && !op->src[4] && max_bias == 0 && soft_cap == 0 && q->ne[3] == 1 &&
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
    size_t acts = 0, states = 0, angles = 0;
    const Tensor *quantized = nullptr; // what acts_ holds, and in blocks of how many
    int act_block = 0;

    std::vector<const Tensor *> ops;
    for (const Tensor *node : nodes) {
        if (!is_view(node) && !is_empty(node) && (node->flags & FLAG_COMPUTE)) {
            ops.push_back(node);
        }
    }
    for (size_t i = 0; i < ops.size(); i++) {
        const Tensor *op = ops[i], *next = i + 1 < ops.size() ? ops[i + 1] : nullptr;
        switch (op->op) {
        case OP_MUL_MAT: {
            const Tensor *x = op->src[1];
            const Format &format = FORMATS[find_type(op->src[0]->type)];
            if (quantized != x || act_block != format.act_block) {
                steps_.emplace_back(&Executor::quantize, op);
                quantized = x;
                act_block = format.act_block;
            }
            acts = std::max(acts, (size_t)(n_steps(x->ne[0]) * record_bytes((int)n_rows(x))));
            steps_.emplace_back(&Executor::matmul, op);
            // The sum is written together with the product. Nothing else can live in its memory by now
            // but x, and x has been quantized.
            if (next && next->op == OP_ADD && (next->src[0] == op || next->src[1] == op) && same_shape(next, op) &&
                next->src[0] != next->src[1]) {
                steps_.back().fused = next;
                steps_.back().other = next->src[next->src[0] == op];
                i++;
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
            const Attention a = attention(op, n_threads);
            const int64_t n = a.by_segment ? a.n_units() * a.n_segments : 2 * n_threads;
            states = std::max(states, (size_t)n * a.state_floats());
            steps_.emplace_back(&Executor::attend, op);
            if (a.by_segment) {
                steps_.emplace_back(&Executor::merge, op);
            }
            break;
        }
        default:
            return false;
        }
    }
    if (n_counters_ < steps_.size()) { // atomics cannot move
        n_counters_ = steps_.size();
        counters_ = std::make_unique<std::atomic<int64_t>[]>(n_counters_);
    }
    for (size_t i = 0; i < steps_.size(); i++) {
        counters_[i].store(0, std::memory_order_relaxed);
        if (steps_[i].run != &Executor::rope) {
            steps_[i].index = i;
        }
    }
    const size_t acts_size = (acts + 127) / 64 * 64, size = 64 + acts_size + 4 * (states + angles);
    if (memory_size_ < size) {
        memory_.reset(); // first, so that both are never held
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

int Executor::compute(Graph *graph) {
    std::vector<Tensor *> nodes((size_t)ggml_.graph_n_nodes(graph));
    for (size_t i = 0; i < nodes.size(); i++) {
        nodes[i] = ggml_.graph_node(graph, (int)i);
    }
    return compute(nodes);
}

int Executor::compute(const std::vector<Tensor *> &nodes) {
    try {
        if (!plan(nodes)) {
            return -1;
        }
    } catch (const std::bad_alloc &) {
        memory_size_ = 0;
        return STATUS_ALLOC_FAILED;
    }
    n_wanted_.store(steps_.size(), std::memory_order_relaxed);
    run_team(n_threads, [this](Team &team, int thread) { run(team, thread); });
    return n_wanted_.load(std::memory_order_relaxed) < steps_.size() ? STATUS_ABORTED : STATUS_SUCCESS;
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

// ---- products ----

void Executor::quantize(const Step &step, int thread, int n) {
    const Tensor *x = step.op->src[1];
    const int block = FORMATS[find_type(step.op->src[0]->type)].act_block;
    const int64_t columns = x->ne[0], tokens = n_rows(x), blocks = columns / block, tiles = n_tiles(tokens);
    // By blocks, for all tokens of a tile: those are neighbours in the packed activations, and threads that
    // write to the same lines of cache wait for each other (0.75 ms of 26 for 8 tokens).
    const Share share(tiles * blocks, thread, n);
    for (int64_t unit = share.first; unit < share.last;) {
        const int64_t tile = unit / blocks, first = unit % blocks, last = std::min(blocks, first + share.last - unit);
        const int64_t begin = tile_begin(tokens, tiles, tile), end = tile_begin(tokens, tiles, tile + 1);
        for (int64_t c = begin; c < end; c++) {
            isa_.quantize(column(x, c), columns, block, first, last, acts_ + begin * n_steps(columns) * record_bytes(1),
                          (int)(end - begin), (int)(c - begin));
        }
        unit += last - first;
    }
}

void Executor::matmul(const Step &step, int, int n) {
    const Tensor *w = step.op->src[0];
    const Type type = find_type(w->type);
    const int64_t columns = w->ne[0], rows = w->ne[1], tokens = n_rows(step.op->src[1]), tiles = n_tiles(tokens);
    const int64_t bytes = group_bytes(type, columns, isa_.lanes), groups = n_groups(rows, isa_.lanes);
    // Chunks small enough to share evenly, yet each a stream that is worth starting; and where more than one
    // tile passes over them, small enough to stay in cache.
    int64_t chunks = std::min<int64_t>(n * 8, std::max<int64_t>(n, groups * bytes >> 17));
    if (tiles > 1) {
        chunks = std::max(chunks, groups * bytes >> 18);
    }
    chunks = std::min(groups, chunks);
    float *y = (float *)step.op->data;
    const auto &kernels = isa_.matmul[type];
    for (int64_t chunk; (chunk = counters_[step.index].fetch_add(1, std::memory_order_relaxed)) < chunks;) {
        const int64_t g0 = groups * chunk / chunks, g1 = groups * (chunk + 1) / chunks;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t begin = tile_begin(tokens, tiles, tile), nc = tile_begin(tokens, tiles, tile + 1) - begin;
            const int8_t *acts = acts_ + begin * n_steps(columns) * record_bytes(1);
            for (int64_t g = g0; g < g1; g++) {
                const int64_t first = g * isa_.lanes;
                kernels[nc - 1]((const uint8_t *)w->data + g * bytes, n_packets(type, columns), acts,
                                y + begin * rows + first, rows, (int)std::min<int64_t>(isa_.lanes, rows - first));
            }
        }
        if (step.fused) {
            const int64_t first = g0 * isa_.lanes, last = std::min(rows, g1 * isa_.lanes);
            for (int64_t c = 0; c < tokens; c++) {
                isa_.add(last - first, y + c * rows + first, row<const float>(step.other, c, step.fused) + first,
                         row<float>(step.fused, c, step.fused) + first);
            }
        }
    }
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

Executor::Attention Executor::attention(const Tensor *op, int n_threads) const {
    const Tensor *q = op->src[0], *k = op->src[1];
    Attention a;
    a.head_dim = q->ne[0];
    a.n_heads = k->ne[2];
    a.gqa = q->ne[2] / k->ne[2];
    a.n_rows = q->ne[1] * a.gqa;
    a.n_kv = k->ne[1];
    a.n_segments = (a.n_kv + ATTN_SEGMENT - 1) / ATTN_SEGMENT;
    a.n_tiles = (a.n_rows + ATTN_ROWS - 1) / ATTN_ROWS;
    a.by_segment = a.n_segments > 1 && a.n_units() < 4 * n_threads;
    a.tile_rows = (a.n_rows + a.n_tiles - 1) / a.n_tiles;
    return a;
}

namespace {

// The queries and the head of the cache of a unit; returns their token and head of each row.
struct Rows {
    AttentionUnit unit;
    int64_t token[ATTN_ROWS], head[ATTN_ROWS];
};

void fill_rows(const Tensor *op, int64_t cache_head, int64_t gqa, int64_t first, int64_t last, Rows &rows) {
    const Tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    AttentionUnit &u = rows.unit;
    u.head_dim = q->ne[0];
    u.rows = (int)(last - first);
    u.k = at<const char>(k, 0, cache_head);
    u.v = at<const char>(v, 0, cache_head);
    u.k_stride = (int64_t)k->nb[1];
    u.v_stride = (int64_t)v->nb[1];
    u.scale = param(op, 0);
    for (int r = 0; r < u.rows; r++) {
        rows.token[r] = (first + r) / gqa;
        rows.head[r] = cache_head * gqa + (first + r) % gqa;
        u.q[r] = at<const float>(q, rows.token[r], rows.head[r]);
        u.mask[r] = at<const uint16_t>(mask, rows.token[r]);
    }
}

void reset(const AttentionState &state, int64_t head_dim, int rows) {
    std::fill(state.max, state.max + rows, -INFINITY);
    std::fill(state.sum, state.sum + rows, 0.0f);
    std::fill(state.out, state.out + rows * head_dim, 0.0f);
}

} // namespace

void Executor::attend(const Step &step, int thread, int n) {
    const Attention a = attention(step.op, n_threads);
    const int64_t units = a.n_units() * (a.by_segment ? a.n_segments : 1);
    Rows rows;
    for (int64_t unit; (unit = counters_[step.index].fetch_add(1, std::memory_order_relaxed)) < units;) {
        const int64_t tile = unit % a.n_units(), segment = unit / a.n_units();
        const int64_t head = tile / a.n_tiles, t = tile % a.n_tiles;
        fill_rows(step.op, head, a.gqa, a.n_rows * t / a.n_tiles, a.n_rows * (t + 1) / a.n_tiles, rows);
        const auto bounds = [&](int64_t s) { return std::min(a.n_kv, s * ATTN_SEGMENT); };
        if (a.by_segment) {
            const AttentionState part =
                AttentionState::at(states_ + (size_t)unit * a.state_floats(), a.head_dim, rows.unit.rows);
            isa_.attend(rows.unit, bounds(segment), bounds(segment + 1), part);
            continue;
        }
        float *memory = states_ + (size_t)thread * 2 * a.state_floats();
        const AttentionState total = AttentionState::at(memory, a.head_dim, rows.unit.rows);
        const AttentionState part = AttentionState::at(memory + a.state_floats(), a.head_dim, rows.unit.rows);
        reset(total, a.head_dim, rows.unit.rows);
        for (int64_t s = 0; s < a.n_segments; s++) {
            isa_.attend(rows.unit, bounds(s), bounds(s + 1), part);
            isa_.merge(a.head_dim, rows.unit.rows, part, total);
        }
        for (int r = 0; r < rows.unit.rows; r++) {
            isa_.scale(a.head_dim, total.out + r * a.head_dim, total.sum[r] > 0 ? 1 / total.sum[r] : 0, 0,
                       at<float>(step.op, rows.head[r], rows.token[r]));
        }
    }
    (void)n;
}

void Executor::merge(const Step &step, int thread, int n) {
    const Attention a = attention(step.op, n_threads);
    const Share share(a.n_units(), thread, n);
    Rows rows;
    for (int64_t tile = share.first; tile < share.last; tile++) {
        const int64_t head = tile / a.n_tiles, t = tile % a.n_tiles;
        fill_rows(step.op, head, a.gqa, a.n_rows * t / a.n_tiles, a.n_rows * (t + 1) / a.n_tiles, rows);
        float *memory = states_ + (size_t)tile * a.state_floats();
        // The first segment's state takes the others; joining it to a fresh one changes no bit of it.
        const AttentionState total = AttentionState::at(memory, a.head_dim, rows.unit.rows);
        for (int64_t s = 1; s < a.n_segments; s++) {
            const AttentionState part = AttentionState::at(memory + (size_t)(s * a.n_units()) * a.state_floats(),
                                                           a.head_dim, rows.unit.rows);
            isa_.merge(a.head_dim, rows.unit.rows, part, total);
        }
        for (int r = 0; r < rows.unit.rows; r++) {
            isa_.scale(a.head_dim, total.out + r * a.head_dim, total.sum[r] > 0 ? 1 / total.sum[r] : 0, 0,
                       at<float>(step.op, rows.head[r], rows.token[r]));
        }
    }
}

} // namespace edgespec
