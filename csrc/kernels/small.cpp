// What the small steps of an Executor do, between the products: the part of one of n threads.
#include "graph.h"
#include "share.h"
#include "tensor.h"

namespace edgespec {

using namespace ggml;

void Executor::norm(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0];
    const auto f = op->op == OP_RMS_NORM ? isa_.rms_norm : op->op == OP_NORM ? isa_.norm : isa_.l2_norm;
    const Share share(n_rows(x), thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        float *y = row<float>(op, r, op);
        f(x->ne[0], row<const float>(x, r, x), param(op, 0), y);
        if (step.fused) {
            isa_.mul(x->ne[0], y, row<const float>(step.other, r, x), row<float>(step.fused, r, x));
        }
        if (step.biased) {
            isa_.add(x->ne[0], row<const float>(step.fused, r, x), (const float *)step.biased->src[1]->data,
                     row<float>(step.biased, r, x));
        }
    }
}

void Executor::keep(const Step &step, int thread, int n) {
    const std::vector<float *> &to = kept_[step.kept];
    each_part(step.op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
        if (float *const out = to[(size_t)r]) {
            memcpy(out + first, column(step.op, r) + first, (size_t)(last - first) * sizeof(float));
        }
    });
}

// ---- element by element ----

void Executor::binary(const Step &step, int thread, int n) {
    constexpr int64_t SPLAT = 256;
    const Tensor *op = step.op, *a = op->src[0], *b = op->src[1];
    BinaryFn *const f = op->op == OP_ADD   ? isa_.add
                        : op->op == OP_SUB ? isa_.sub
                        : op->op == OP_MUL ? isa_.mul
                                           : isa_.divide;
    each_part(op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
        const float *from = row<const float>(a, r, op), *other = row<const float>(b, r, op);
        float *to = row<float>(op, r, op);
        if (b->ne[0] == op->ne[0]) {
            f(last - first, from + first, other + first, to + first);
            return;
        }
        float same[SPLAT]; // one number for the whole row
        std::fill(same, same + std::min(SPLAT, last - first), *other);
        for (int64_t i = first; i < last; i += SPLAT) {
            f(std::min(SPLAT, last - i), from + i, same, to + i);
        }
    });
}

namespace {

void softplus_of(int64_t n, const float *x, float, float, float *y) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = softplus(x[i]);
    }
}

void fill(int64_t n, const float *, float a, float, float *y) { std::fill(y, y + n, a); }

UnaryFn *find_unary(const Isa &isa, const Tensor *op) {
    switch (op->op) {
    case OP_FILL: return fill;
    case OP_SCALE: return isa.scale;
    case OP_CLAMP: return isa.clamp;
    case OP_SQR: return isa.square;
    case OP_SQRT: return isa.square_root;
    }
    switch (op->op_params[0]) {
    case UNARY_NEG: return isa.negative;
    case UNARY_TANH: return isa.tanh;
    case UNARY_RELU: return isa.relu;
    case UNARY_SIGMOID: return isa.sigmoid;
    case UNARY_GELU: return isa.gelu;
    case UNARY_SILU: return isa.silu;
    case UNARY_EXP: return isa.exponential;
    case UNARY_GELU_ERF: return isa.gelu_erf;
    default: return softplus_of;
    }
}

GatedFn *find_gated(const Isa &isa, const Tensor *op) {
    switch (op->op_params[0]) {
    case GLU_REGLU: return isa.reglu;
    case GLU_GEGLU: return isa.geglu;
    case GLU_SWIGLU: return isa.swiglu;
    case GLU_SWIGLU_OAI: return isa.swiglu_oai;
    case GLU_GEGLU_QUICK: return isa.geglu_quick;
    default: return isa.swiglu_clamp;
    }
}

} // namespace

void Executor::unary(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0] ? op->src[0] : op; // FILL has none
    UnaryFn *const f = find_unary(isa_, op);
    each_part(op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
        f(last - first, row<const float>(x, r, op) + first, param(op, 0), param(op, 1), row<float>(op, r, op) + first);
    });
}

void Executor::glu(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0], *g = op->src[1];
    GatedFn *const f = find_gated(isa_, op);
    // Without a second operand both are halves of the first, in the order that `swapped` says.
    const int64_t half = x->ne[0] / 2, swapped = op->op_params[1];
    each_part(op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
        const float *a = row<const float>(x, r, x), *b = g ? row<const float>(g, r, g) : a;
        if (!g) {
            (swapped ? a : b) += half;
        }
        f(last - first, a + first, b + first, param(op, 2), param(op, 3), row<float>(op, r, op) + first);
    });
}

// Row (expert used, token) of a, and of b the row of that expert.
void Executor::add_id(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *a = op->src[0], *b = op->src[1], *ids = op->src[2];
    each_part(op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
        const int32_t id = at<const int32_t>(ids, r / op->ne[1])[r % op->ne[1]];
        if (id >= 0 && id < b->ne[1]) {
            isa_.add(last - first, row<const float>(a, r, op) + first, at<const float>(b, id) + first,
                     row<float>(op, r, op) + first);
        }
    });
}

// ---- row by row ----

void Executor::sum_rows(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0];
    const Share share(n_rows(op), thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        const float sum = isa_.sum(x->ne[0], row<const float>(x, r, x));
        *row<float>(op, r, op) = op->op == OP_MEAN ? sum / (float)x->ne[0] : sum;
    }
}

void Executor::soft_max(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0];
    const Share share(n_rows(op), thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        isa_.soft_max(x->ne[0], row<const float>(x, r, x), param(op, 0), row<float>(op, r, op));
    }
}

void Executor::hadamard(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[1];
    const Share share(n_rows(x), thread, n);
    const int64_t width = x->ne[0], first = share.first * width;
    isa_.hadamard(width, (share.last - share.first) * width, (const float *)x->data + first, (float *)op->data + first);
}

// The numbers as keys in the same order; of equal ones the first comes first.
void Executor::argsort(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0];
    const uint32_t flip = op->op_params[0] == SORT_DESCENDING ? ~(uint32_t)0 : 0;
    const Share share(n_rows(op), thread, n);
    uint64_t *const keys = keys_ + (size_t)thread * n_keys_;
    for (int64_t r = share.first; r < share.last; r++) {
        const float *from = row<const float>(x, r, x);
        int32_t *to = row<int32_t>(op, r, op);
        for (int64_t i = 0; i < op->ne[0]; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, sizeof bits);
            bits = (bits & 1u << 31 ? ~bits : bits | 1u << 31) ^ flip;
            keys[i] = (uint64_t)bits << 32 | (uint32_t)i;
        }
        std::sort(keys, keys + op->ne[0]);
        for (int64_t i = 0; i < op->ne[0]; i++) {
            to[i] = (int32_t)(uint32_t)keys[i];
        }
    }
}

// ---- copies ----

namespace {

int64_t index_at(const Tensor *index, int64_t i1, int64_t i2, int64_t i3) {
    return index->type == TYPE_I64 ? at<const int64_t>(index, i2, i3)[i1] : at<const int32_t>(index, i2, i3)[i1];
}

} // namespace

// Rows (r, i2, i3) of x into those that the index names, quantized where the rows are a cache's.
void Executor::set_rows(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0], *index = op->src[1];
    const Share share(n_rows(x), thread, n);
    for (int64_t i = share.first; i < share.last; i++) {
        const int64_t r = i % x->ne[1], i2 = i / x->ne[1] % x->ne[2], i3 = i / x->ne[1] / x->ne[2];
        const int64_t to = index_at(index, r, i2 % index->ne[1], i3 % index->ne[2]);
        const float *const from = at<const float>(x, r, i2, i3);
        switch (cache_format(op->type)) {
        case F16_CACHE: isa_.to_half(x->ne[0], from, at<uint16_t>(op, to, i2, i3)); break;
        case Q8_CACHE: isa_.to_q8(x->ne[0], from, at<uint8_t>(op, to, i2, i3)); break;
        case Q4_CACHE: isa_.to_q4(x->ne[0], from, at<uint8_t>(op, to, i2, i3)); break;
        default: memcpy(at<float>(op, to, i2, i3), from, (size_t)op->ne[0] * 4);
        }
    }
}

void Executor::get_rows(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0], *index = op->src[1];
    const Share share(n_rows(op), thread, n);
    for (int64_t i = share.first; i < share.last; i++) {
        const int64_t r = i % op->ne[1], i2 = i / op->ne[1] % op->ne[2], i3 = i / op->ne[1] / op->ne[2];
        memcpy(at<float>(op, r, i2, i3), at<const float>(x, index_at(index, r, i2, i3), i2, i3), (size_t)op->ne[0] * 4);
    }
}

namespace {

// n floats that lie `from_step` and `to_step` bytes apart.
void copy_numbers(int64_t n, const char *from, size_t from_step, char *to, size_t to_step) {
    if (from_step == 4 && to_step == 4) {
        memcpy(to, from, (size_t)n * 4);
        return;
    }
    for (int64_t i = 0; i < n; i++, from += from_step, to += to_step) {
        memcpy(to, from, 4);
    }
}

// Goes through a tensor's numbers in their order.
class Walk {
  public:
    Walk(const Tensor *t, int64_t first) : t_(t) {
        for (int d = 0; d < 4; d++) {
            i_[d] = first % t->ne[d];
            first /= t->ne[d];
        }
    }
    char *data() const {
        char *p = (char *)t_->data;
        for (int d = 0; d < 4; d++) {
            p += i_[d] * (int64_t)t_->nb[d];
        }
        return p;
    }
    int64_t rest_of_row() const { return t_->ne[0] - i_[0]; }
    void move(int64_t n) {
        i_[0] += n;
        for (int d = 0; d < 3 && i_[d] == t_->ne[d]; d++) {
            i_[d] = 0;
            i_[d + 1]++;
        }
    }

  private:
    const Tensor *t_;
    int64_t i_[4];
};

} // namespace

void Executor::copy(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0];
    if (op->type == TYPE_F16) {
        each_part(op, thread, n, [&](int64_t r, int64_t first, int64_t last) {
            isa_.to_half(last - first, row<const float>(x, r, op) + first, row<uint16_t>(op, r, op) + first);
        });
        return;
    }
    // As many numbers, maybe of another shape.
    const Share share(op->ne[0] * n_rows(op), thread, n);
    Walk from(x, share.first), to(op, share.first);
    for (int64_t i = share.first; i < share.last;) {
        const int64_t length = std::min({from.rest_of_row(), to.rest_of_row(), share.last - i});
        copy_numbers(length, from.data(), x->nb[0], to.data(), op->nb[0]);
        from.move(length);
        to.move(length);
        i += length;
    }
}

void Executor::repeat(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *x = op->src[0];
    const Share share(n_rows(op), thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        const char *from = row<const char>(x, r, op);
        char *to = row<char>(op, r, op);
        for (int64_t i = 0; i < op->ne[0]; i += x->ne[0]) {
            copy_numbers(x->ne[0], from, x->nb[0], to + i * (int64_t)op->nb[0], op->nb[0]);
        }
    }
}

void Executor::concat(const Step &step, int thread, int n) {
    const Tensor *op = step.op, *a = op->src[0], *b = op->src[1];
    const int dim = op->op_params[0];
    const Share share(n_rows(op), thread, n);
    for (int64_t r = share.first; r < share.last; r++) {
        int64_t i[4] = {0, r % op->ne[1], r / op->ne[1] % op->ne[2], r / op->ne[1] / op->ne[2]};
        char *const to = row<char>(op, r, op);
        if (dim == 0) {
            copy_numbers(a->ne[0], at<const char>(a, i[1], i[2], i[3]), a->nb[0], to, op->nb[0]);
            copy_numbers(b->ne[0], at<const char>(b, i[1], i[2], i[3]), b->nb[0],
                         to + a->ne[0] * (int64_t)op->nb[0], op->nb[0]);
            continue;
        }
        const Tensor *from = i[dim] < a->ne[dim] ? a : b;
        i[dim] -= from == a ? 0 : a->ne[dim];
        copy_numbers(op->ne[0], at<const char>(from, i[1], i[2], i[3]), from->nb[0], to, op->nb[0]);
    }
}

// ---- convolution ----

// Each channel's numbers of the tokens before and of these lie side by side; output is by token. Channels of a line of
// the processor's cache go together, so that a line of the output is written once.
void Executor::ssm_conv(const Step &step, int thread, int n) {
    constexpr int64_t CHANNELS = 16;
    const Tensor *op = step.op, *x = op->src[0], *w = op->src[1];
    const int64_t width = w->ne[0], channels = op->ne[0], blocks = (channels + CHANNELS - 1) / CHANNELS;
    const Share share(blocks * op->ne[2], thread, n);
    for (int64_t unit = share.first; unit < share.last; unit++) {
        const int64_t sequence = unit / blocks, first = unit % blocks * CHANNELS;
        const int64_t last = std::min(channels, first + CHANNELS);
        for (int64_t token = 0; token < op->ne[1]; token++) {
            float *const y = at<float>(op, token, sequence);
            for (int64_t channel = first; channel < last; channel++) {
                const float *const from = at<const float>(x, channel, sequence) + token;
                const float *const weights = at<const float>(w, channel);
                float sum = 0;
                for (int64_t i = 0; i < width; i++) {
                    sum += from[i] * weights[i];
                }
                y[channel] = sum;
            }
        }
    }
}

} // namespace edgespec
