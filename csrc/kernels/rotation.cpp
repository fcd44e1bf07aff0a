// The steps of an Executor that rotate queries and keys by their positions.
#include "graph.h"
#include "share.h"
#include "tensor.h"

#include <math.h>

namespace edgespec {

using namespace ggml;

namespace {

// The angles of ggml's operation: where positions have several parts, of a text all the same, each pair of numbers is
// rotated by one of them (M-RoPE, arXiv 2409.12191, also interleaved); and by a mixture of the angles of a short and a
// long context (YaRN, arXiv 2309.00071, section 3.4).
struct Rotation {
    const Tensor *op;
    int64_t n_dims = op->op_params[1];
    float base = param(op, 5), scale = param(op, 6), mix = param(op, 7), size = param(op, 8);
    float step = powf(base, -2.0f / (float)n_dims);
    float low, high; // pairs below and above turn at the short and at the long context's angles
    const float *factors = op->src[2] ? (const float *)op->src[2]->data : nullptr;
    bool has_sections = op->op_params[2] == ROPE_MROPE || op->op_params[2] == ROPE_IMROPE;

    explicit Rotation(const Tensor *o) : op(o) {
        low = std::max(0.0f, floorf(pair_of(param(op, 9))));
        high = std::min((float)n_dims - 1, ceilf(pair_of(param(op, 10))));
        if (mix != 0) {
            size *= 1 + 0.1f * logf(1 / scale);
        }
    }

    // The pair that turns so often in the short context.
    float pair_of(float turns) const {
        return (float)n_dims * logf((float)op->op_params[4] / (turns * 2 * (float)M_PI)) / (2 * logf(base));
    }

    // Which part of the position turns a pair.
    int part_of(int64_t pair) const {
        const int32_t *const n = op->op_params + 11;
        const int64_t i = pair % (n[0] + n[1] + n[2] + n[3]);
        if (op->op_params[2] == ROPE_IMROPE) {
            return i % 3 == 1 && i < 3 * n[1] ? 1 : i % 3 == 2 && i < 3 * n[2] ? 2 : i % 3 == 0 && i < 3 * n[0] ? 0 : 3;
        }
        return i < n[0] ? 0 : i < n[0] + n[1] ? 1 : i < n[0] + n[1] + n[2] ? 2 : 3;
    }

    void compute(int64_t token, float *cosines, float *sines) const {
        const int32_t *const positions = (const int32_t *)op->src[1]->data;
        float theta[4];
        for (int part = 0; part < 4; part++) {
            theta[part] = (float)positions[token + (has_sections ? part * op->ne[2] : 0)];
        }
        for (int64_t i = 0; i < n_dims / 2; i++) {
            const float full = theta[has_sections ? part_of(i) : 0] / (factors ? factors[i] : 1);
            float angle = scale * full;
            if (mix != 0) {
                const float ramp = ((float)i - low) / std::max(0.001f, high - low);
                const float share = (1 - std::min(1.0f, std::max(0.0f, ramp))) * mix;
                angle = angle * (1 - share) + full * share;
            }
            cosines[i] = cosf(angle) * size;
            sines[i] = sinf(angle) * size;
            for (float &t : theta) {
                t *= step;
            }
        }
    }
};

} // namespace

void Executor::compute_angles(int thread, int n) {
    for (const Angles &angles : angles_) {
        const Rotation rotation(angles.op);
        const int64_t half = rotation.n_dims / 2;
        const Share share(angles.op->ne[2], thread, n);
        for (int64_t t = share.first; t < share.last; t++) {
            rotation.compute(t, angles.cosines + t * half, angles.sines + t * half);
        }
    }
}

void Executor::rope(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0];
    const Angles &angles = angles_[step.angles];
    const int64_t n_dims = op->op_params[1], first = op->op_params[15], last = first + n_dims;
    const Share share(n_rows(op), thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        const int64_t token = r / op->ne[1];
        const float *from = row<const float>(x, r, op);
        float *to = row<float>(op, r, op);
        isa_.rope(n_dims, op->op_params[2] != ROPE_NORMAL, from + first, angles.cosines + token * n_dims / 2,
                  angles.sines + token * n_dims / 2, to + first);
        if (from != to) {
            memcpy(to, from, (size_t)first * 4);
            memcpy(to + last, from + last, (size_t)(op->ne[0] - last) * 4);
        }
    }
}

} // namespace edgespec
