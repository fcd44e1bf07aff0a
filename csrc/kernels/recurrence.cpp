// The steps of an Executor over layers whose memory is a state: gated delta nets and state spaces.
#include "graph.h"
#include "share.h"
#include "tensor.h"

#include <math.h>

namespace edgespec {

using namespace ggml;

namespace {

// Calls f(head, sequence, first, last) for this thread's share of the work: rows [first, last) of a head, a quarter of
// all that it has.
template <class F> void each_quarter(int64_t rows, int64_t heads, int64_t sequences, int thread, int n, const F &f) {
    constexpr int64_t QUARTERS = 4;
    const Share share(sequences * heads * QUARTERS, thread, n);
    for (int64_t unit = share.first; unit < share.last; unit++) {
        const int64_t quarter = unit % QUARTERS, head = unit / QUARTERS % heads;
        f(head, unit / QUARTERS / heads, rows * quarter / QUARTERS, rows * (quarter + 1) / QUARTERS);
    }
}

} // namespace

// Output: [sequence][token][head][width], then the states, the last first: [slot][sequence][head][width][width].
void Executor::delta_net(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *q = op->src[0], *k = op->src[1], *v = op->src[2], *g = op->src[3], *beta = op->src[4];
    const Tensor *state = op->src[5];
    const int64_t width = v->ne[0], heads = v->ne[1], tokens = v->ne[2], sequences = v->ne[3];
    float *const y = (float *)op->data, *const states = y + width * heads * tokens * sequences;
    const bool by_column = g->ne[0] > 1;
    float *const decay = states_ + (size_t)thread * recurrence_floats_;
    each_quarter(width, heads, sequences, thread, n, [&](int64_t head, int64_t sequence, int64_t first, int64_t last) {
        for (int64_t t = 0; t < tokens; t++) {
            const float *const from = at<const float>(g, head, t, sequence);
            for (int64_t i = 0; i < g->ne[0]; i++) {
                decay[t * g->ne[0] + i] = expf(from[i]);
            }
        }
        DeltaNet net = {};
        net.width = width;
        net.tokens = tokens;
        net.q = at<const float>(q, head % q->ne[1], 0, sequence / (sequences / q->ne[3]));
        net.k = at<const float>(k, head % k->ne[1], 0, sequence / (sequences / k->ne[3]));
        net.v = at<const float>(v, head, 0, sequence);
        net.beta = at<const float>(beta, head, 0, sequence);
        net.q_stride = (int64_t)q->nb[2] / 4;
        net.k_stride = (int64_t)k->nb[2] / 4;
        net.v_stride = (int64_t)v->nb[2] / 4;
        net.beta_stride = (int64_t)beta->nb[2] / 4;
        net.decay = decay;
        net.by_column = by_column;
        net.scale = 1 / sqrtf((float)width);
        net.state = at<const float>(state, 0, head, sequence);
        net.y = y + (sequence * tokens * heads + head) * width;
        net.y_stride = heads * width;
        net.states = states + (sequence * heads + head) * width * width;
        net.slots = op->op_params[0];
        net.slot_stride = width * width * heads * sequences;
        isa_.delta_net(net, first, last);
    });
}

// Output: [sequence][token][head][rows], then the states, the last first: [slot][sequence][head][rows][width].
void Executor::state_scan(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *state = op->src[0], *x = op->src[1], *dt = op->src[2], *a = op->src[3];
    const Tensor *b = op->src[4], *c = op->src[5], *ids = op->src[6];
    const int64_t width = state->ne[0], rows = state->ne[1], heads = x->ne[1], tokens = x->ne[2], sequences = x->ne[3];
    float *const y = (float *)op->data, *const states = y + rows * heads * tokens * sequences;
    float *const decay = states_ + (size_t)thread * recurrence_floats_, *const steps = decay + tokens;
    each_quarter(rows, heads, sequences, thread, n, [&](int64_t head, int64_t sequence, int64_t first, int64_t last) {
        const int64_t group = head / (heads / b->ne[1]);
        for (int64_t t = 0; t < tokens; t++) {
            steps[t] = softplus(at<const float>(dt, t, sequence)[head]);
            decay[t] = expf(steps[t] * *at<const float>(a, head));
        }
        StateScan scan = {};
        scan.width = width;
        scan.tokens = tokens;
        scan.x = at<const float>(x, head, 0, sequence);
        scan.b = at<const float>(b, group, 0, sequence);
        scan.c = at<const float>(c, group, 0, sequence);
        scan.x_stride = (int64_t)x->nb[2] / 4;
        scan.b_stride = (int64_t)b->nb[2] / 4;
        scan.c_stride = (int64_t)c->nb[2] / 4;
        scan.decay = decay;
        scan.step = steps;
        scan.state = at<const float>(state, 0, head, ((const int32_t *)ids->data)[sequence]);
        scan.y = y + (sequence * tokens * heads + head) * rows;
        scan.y_stride = heads * rows;
        scan.states = states + (sequence * heads + head) * rows * width;
        scan.slots = op->op_params[0];
        scan.slot_stride = rows * width * heads * sequences;
        isa_.state_scan(scan, first, last);
    });
}

} // namespace edgespec
