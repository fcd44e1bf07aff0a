// In which steps a graph is run. What a step does: operations.cpp, experts.cpp, recurrence.cpp, rotation.cpp and
// small.cpp.
#include "full_attention.h"
#include "graph.h"
#include "product.h"
#include "tensor.h"

#include <algorithm>

namespace edgespec {

using namespace ggml;

namespace {

// As llama.cpp names them.
bool is_logits(const Tensor *t) { return t->op == OP_MUL_MAT && !strcmp(t->name, "result_output"); }

bool is_empty(const Tensor *t) { return t->ne[0] * n_rows(t) == 0; }

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

} // namespace

// ---- planning ----

namespace {

// Operations of one step, with nothing to plan.
constexpr struct {
    int op;
    void (Executor::*run)(const Executor::Step &, int, int);
} PLAIN[] = {
    {OP_ADD, &Executor::binary},        {OP_SUB, &Executor::binary},        {OP_MUL, &Executor::binary},
    {OP_DIV, &Executor::binary},        {OP_SCALE, &Executor::unary},       {OP_CLAMP, &Executor::unary},
    {OP_SQR, &Executor::unary},         {OP_SQRT, &Executor::unary},        {OP_UNARY, &Executor::unary},
    {OP_FILL, &Executor::unary},        {OP_GLU, &Executor::glu},           {OP_ADD_ID, &Executor::add_id},
    {OP_SUM_ROWS, &Executor::sum_rows}, {OP_MEAN, &Executor::sum_rows},     {OP_SOFT_MAX, &Executor::soft_max},
    {OP_ARGSORT, &Executor::argsort},   {OP_L2_NORM, &Executor::norm},
    {OP_SET_ROWS, &Executor::set_rows}, {OP_GET_ROWS, &Executor::get_rows}, {OP_CONT, &Executor::copy},
    {OP_REPEAT, &Executor::repeat},     {OP_CONCAT, &Executor::concat},
    {OP_SSM_CONV, &Executor::ssm_conv},
};

} // namespace

bool Executor::plan(const std::vector<Tensor *> &nodes) {
    steps_.clear();
    angles_.clear();
    attentions_.clear();
    tiles_.clear();
    routings_.clear();
    kept_.clear();
    parts_.clear();
    recurrence_floats_ = 0;
    n_views_ = 0;
    wide_from_ = edgespec::wide_from(isa_);

    std::vector<const Tensor *> ops;
    for (const Tensor *node : nodes) {
        if (!is_view(node) && !is_empty(node) && (node->flags & FLAG_COMPUTE)) {
            ops.push_back(node);
        }
    }
    learn_cells(ops);
    Planning planning(ops);
    for (; planning.i < ops.size(); planning.i++) {
        const size_t first = planning.i;
        const Tensor *op = ops[first];
        switch (op->op) {
        case OP_MUL_MAT:
        case OP_MUL_MAT_ID:
            op = is_logits(op) ? last_logits(op) : op;
            if (!is_empty(op)) {
                plan_product(planning, op);
            }
            break;
        case OP_RMS_NORM:
        case OP_NORM:
            plan_norm(planning, op);
            break;
        case OP_ROPE:
            plan_rope(planning, op);
            break;
        case OP_FLASH_ATTN_EXT:
            if (FullAttention::fits(op)) {
                plan_full_attention(planning, op);
            } else {
                plan_attention(planning, op);
            }
            break;
        case OP_CPY:
            plan_copy(planning, op);
            break;
        case OP_GATED_DELTA_NET:
        case OP_SSM_SCAN:
            plan_recurrence(planning, op);
            break;
        default: {
            const auto is_it = [&](const auto &plain) { return plain.op == op->op; };
            const auto plain = std::find_if(std::begin(PLAIN), std::end(PLAIN), is_it);
            if (plain == std::end(PLAIN)) {
                return false;
            }
            steps_.emplace_back(plain->run, op);
            planning.keys = std::max(planning.keys, op->op == OP_ARGSORT ? (size_t)op->ne[0] : 0);
        }
        }
        for (size_t i = first; i <= planning.i; i++) { // several where operations run as one
            plan_kept(ops[i]);
        }
    }
    join_steps();
    set_up_memory(planning);
    return true;
}

// The product whose rows are the last of the logits `op` that are wanted.
const Tensor *Executor::last_logits(const Tensor *op) {
    const int64_t n = op->ne[1], left_out = n - wanted_logits;
    if (wanted_logits < 0 || left_out <= 0 || n_rows(op) != n) {
        return op;
    }
    const auto last_of = [&](const Tensor *t) {
        parts_.push_back(*t);
        Tensor &part = parts_.back();
        part.ne[1] = wanted_logits;
        part.data = (char *)t->data + left_out * (int64_t)t->nb[1];
        return &part;
    };
    Tensor *const part = last_of(op);
    part->src[1] = last_of(op->src[1]);
    return part;
}

void Executor::plan_product(Planning &p, const Tensor *op) {
    const Tensor *w = op->src[0], *x = op->src[1], *next = p.next();
    if (w->type == TYPE_F32) {
        steps_.emplace_back(is_hadamard(op) ? &Executor::hadamard : &Executor::float_matmul, op);
        return;
    }
    const Format &format = FORMATS[find_type(w->type)];
    const bool routed = op->op == OP_MUL_MAT_ID || w->ne[2] > 1;
    const size_t routing = routed ? plan_routing(op) : NONE;
    if (routed) {
        routings_[routing].set_wide_from(edgespec::wide_from(wide_from_, format.acts));
    }
    if (p.quantized != x || p.routing != routing || p.act_kind != format.acts) {
        steps_.emplace_back(routed ? &Executor::quantize_routed : &Executor::quantize, op);
        steps_.back().routing = routing;
        p.quantized = x;
        p.routing = routing;
        p.act_kind = format.acts;
    }
    p.acts = std::max(p.acts, (size_t)(n_steps(x->ne[0]) * record_bytes(format.acts, n_rows(op))));
    steps_.emplace_back(routed ? &Executor::matmul_routed : &Executor::matmul, op);
    Step &step = steps_.back();
    step.routing = routing;
    // The sum is written together with the product. Nothing else can live in its memory by now but x, and x has been
    // quantized.
    const Tensor *other = nullptr;
    if (!routed && next && next->op == OP_ADD && same_shape(next, op) && (next->src[0] == op || next->src[1] == op)) {
        other = next->src[next->src[0] == op];
    }
    if (op->op == OP_MUL_MAT_ID && next && next->op == OP_ADD_ID && next->src[0] == op && next->src[2] == op->src[2]) {
        other = next->src[1];
    }
    if (other && other->ne[0] == op->ne[0] && !Range(other).overlaps(Range(op))) { // not the product again
        step.fused = next;
        step.other = other;
        p.i++;
    }
}

// Which of routings_ a product has; a step that sorts comes before the first one's, once the experts are known.
size_t Executor::plan_routing(const Tensor *op) {
    size_t i = 0;
    while (i < routings_.size() && !routings_[i].fits(op)) {
        i++;
    }
    if (i == routings_.size()) {
        routings_.emplace_back(op);
        steps_.emplace_back(&Executor::route, op);
        steps_.back().routing = i;
    }
    return i;
}

void Executor::plan_norm(Planning &p, const Tensor *op) {
    const Tensor *next = p.next();
    steps_.emplace_back(&Executor::norm, op);
    if (next && next->op == OP_MUL && next->src[0] == op && next->src[1]->ne[0] == op->ne[0] &&
        (next->data == op->data || !Range(next).overlaps(Range(op->src[0])))) {
        steps_.back().fused = next;
        steps_.back().other = next->src[1];
        p.i++;
    }
    // The bias of a layer norm, which is one row. What it is written over must be this row's, or nothing of the step.
    const Tensor *const scaled = steps_.back().fused, *const last = p.next();
    const auto spares = [&](const Tensor *t) {
        return (last->data == t->data && !memcmp(last->nb, t->nb, sizeof t->nb)) || !Range(last).overlaps(Range(t));
    };
    if (op->op == OP_NORM && scaled && last && last->op == OP_ADD && last->src[0] == scaled && n_rows(last->src[1]) == 1 &&
        last->src[1]->ne[0] == op->ne[0] && spares(op) && spares(scaled) && spares(op->src[0])) {
        steps_.back().biased = last;
        p.i++;
    }
}

void Executor::plan_rope(Planning &p, const Tensor *op) {
    size_t a = 0;
    while (a < angles_.size() && (angles_[a].op->src[1] != op->src[1] || angles_[a].op->src[2] != op->src[2] ||
                                  memcmp(angles_[a].op->op_params, op->op_params, sizeof op->op_params))) {
        a++;
    }
    if (a == angles_.size()) {
        angles_.push_back({op, nullptr, nullptr});
        p.angles += (size_t)(op->ne[2] * op->op_params[1]);
    }
    steps_.emplace_back(&Executor::rope, op);
    steps_.back().angles = a;
}

// Decays, and the steps of a scan, are computed for all tokens before.
void Executor::plan_recurrence(Planning &p, const Tensor *op) {
    const bool is_scan = op->op == OP_SSM_SCAN;
    const int64_t floats = is_scan ? 2 * op->src[1]->ne[2] : op->src[3]->ne[0] * op->src[2]->ne[2];
    recurrence_floats_ = std::max(recurrence_floats_, (size_t)(floats + 15) / 16 * 16);
    p.states = std::max(p.states, recurrence_floats_ * (size_t)n_threads);
    steps_.emplace_back(is_scan ? &Executor::state_scan : &Executor::delta_net, op);
}

// A step that copies a hidden state, once it is written.
void Executor::plan_kept(const Tensor *op) {
    std::vector<float *> to;
    if (hidden && hidden->take(op, to)) {
        steps_.emplace_back(&Executor::keep, op);
        steps_.back().kept = kept_.size();
        kept_.push_back(std::move(to));
    }
}

// A step needs no barrier before it where each thread reads only what it has written itself, and overwrites nothing
// that another may still read: sums of rows that are cut in the same way.
void Executor::join_steps() {
    size_t first = 0; // after the last barrier
    for (size_t i = 1; i < steps_.size(); i++) {
        const auto is_binary = [](const Step &s) { return s.run == &Executor::binary; };
        bool joins = is_binary(steps_[i]);
        for (size_t before = first; joins && before < i; before++) {
            const Tensor *a = steps_[before].op, *b = steps_[i].op;
            joins = is_binary(steps_[before]) && same_shape(a, b);
            const auto apart = [](const Tensor *written, const Tensor *read) {
                const bool same = written->data == read->data && same_shape(written, read) &&
                                  !memcmp(written->nb, read->nb, sizeof read->nb);
                return same || !Range(written).overlaps(Range(read));
            };
            for (int s = 0; s < 2; s++) {
                joins = joins && apart(a, b->src[s]) && apart(b, a->src[s]);
            }
            joins = joins && apart(a, b);
        }
        steps_[i].joined = joins;
        first = joins ? first : i;
    }
}

void Executor::set_up_memory(const Planning &p) {
    const size_t acts = p.acts, states = p.states, angles = p.angles;
    const size_t n_counters = steps_.size() * (size_t)n_threads;
    if (n_counters_ < n_counters) { // atomics cannot move
        n_counters_ = n_counters;
        counters_ = std::make_unique<std::atomic<int64_t>[]>(n_counters_);
    }
    for (size_t i = 0; i < n_counters; i++) {
        counters_[i].store(0, std::memory_order_relaxed);
    }
    for (size_t i = 0; i < steps_.size(); i++) {
        steps_[i].index = i * (size_t)n_threads;
    }
    const size_t acts_size = (acts + 127) / 64 * 64, keys_size = (p.keys * (size_t)n_threads * 8 + 63) / 64 * 64;
    const size_t size = 64 + acts_size + keys_size + p.full + 4 * (states + angles);
    if (memory_size_ < size) {
        memory_.reset(); // first, so that both are never held
        memory_size_ = 0;
        memory_.reset(new char[size]);
        memory_size_ = size;
    }
    char *const begin = (char *)(((uintptr_t)memory_.get() + 63) & ~(uintptr_t)63);
    acts_ = (int8_t *)begin;
    keys_ = (uint64_t *)(begin + acts_size);
    n_keys_ = p.keys;
    full_ = begin + acts_size + keys_size;
    states_ = (float *)(full_ + p.full);
    float *next_angles = states_ + states;
    for (Angles &a : angles_) {
        const int64_t n = a.op->ne[2] * a.op->op_params[1] / 2;
        a.cosines = next_angles;
        a.sines = next_angles + n;
        next_angles += 2 * n;
    }
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
        const bool barrier = i + 1 == steps_.size() || !steps_[i + 1].joined;
        if (thread == 0 && barrier && i + 1 < steps_.size() && abort && abort(abort_data)) {
            n_wanted_.store(i + 1, std::memory_order_relaxed);
        }
        (this->*steps_[i].run)(steps_[i], thread, team.size());
        if (barrier) {
            team.barrier();
        }
    }
}

} // namespace edgespec
