// Hidden states that passes leave: the right rows at the right places, on any number of threads and in passes of several
// graphs; what cannot be is refused, and what is incomplete is said to be.
#include "../graph.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

using namespace edgespec;
using ggml::Tensor;

namespace {

constexpr int64_t WIDTH = 40, TOKENS = 13, LAYERS = 3;

void check(bool ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

Tensor matrix(const char *name, int64_t rows, float *data) {
    Tensor t = {};
    t.ne[0] = WIDTH;
    t.ne[1] = rows;
    t.ne[2] = t.ne[3] = 1;
    t.nb[0] = sizeof(float);
    t.nb[1] = WIDTH * sizeof(float);
    t.nb[2] = t.nb[3] = t.nb[1] * (size_t)rows;
    t.data = data;
    t.flags = ggml::FLAG_COMPUTE;
    snprintf(t.name, sizeof t.name, "%s", name);
    return t;
}

// A graph over `n` tokens from `first` on, of which `n_out` have logits: layer i adds i + 1 to all numbers before it, as
// a model's residual; the last one and the norm have `n_out` rows. A tensor of another name stands between.
struct Model {
    std::vector<float> input, ones, values;
    Model(int64_t first, int64_t n) : input((size_t)(n * WIDTH)), ones((size_t)(n * WIDTH), 1), values((size_t)(8 * n * WIDTH)) {
        for (size_t i = 0; i < input.size(); i++) {
            input[i] = (float)((int64_t)i + first * WIDTH);
        }
    }

    int run(int64_t n, int64_t n_out, int n_threads) {
        float *memory = values.data();
        const auto next = [&](int64_t rows) {
            float *const found = memory;
            memory += rows * WIDTH;
            return found;
        };
        Tensor one = matrix("ones", n, ones.data()), in = matrix("inp_embd", n, input.data());
        Tensor first = matrix("l_out-0", n, next(n)), other = matrix("ffn_inp-1", n, next(n)), second = matrix("l_out-1", n, next(n));
        Tensor few = matrix("node_7", n_out, (float *)second.data + (n - n_out) * WIDTH);
        Tensor few_ones = matrix("ones", n_out, ones.data());
        Tensor last = matrix("l_out-2", n_out, next(n)), norm = matrix("norm", n_out, next(n)), result = matrix("result_norm", n_out, next(n));
        const auto add = [](Tensor &to, Tensor &a, Tensor &b) {
            to.op = ggml::OP_ADD;
            to.src[0] = &a;
            to.src[1] = &b;
        };
        add(first, in, one);
        add(other, first, one);
        add(second, other, one);
        add(last, few, few_ones);
        norm.op = ggml::OP_RMS_NORM;
        norm.src[0] = &last;
        result.op = ggml::OP_MUL;
        result.src[0] = &norm;
        result.src[1] = &few_ones;
        static const Ggml none = {};
        Executor executor(*find_isa(es_kernels_isa()), {}, none);
        executor.n_threads = n_threads;
        executor.hidden = &hidden_states();
        return executor.compute({&first, &other, &second, &last, &norm, &result});
    }
};

es_hidden asked(const std::vector<int32_t> &layers, const std::vector<uint8_t> &wanted, std::vector<float> &out) {
    es_hidden found = {};
    found.n_layers = (int32_t)layers.size();
    memcpy(found.layers, layers.data(), layers.size() * sizeof(int32_t));
    found.n_all_layers = LAYERS;
    found.width = WIDTH;
    found.n_tokens = (int64_t)wanted.size();
    found.capacity = (int64_t)out.size() / (WIDTH * found.n_layers);
    found.wanted = wanted.data();
    found.out = out.data();
    return found;
}

// The last `n_out` of all tokens, in graphs over `chunk` tokens of which only the last has logits.
void test_rows(int64_t chunk, int64_t n_out, int n_threads) {
    std::vector<uint8_t> wanted(TOKENS, 0);
    memset(wanted.data() + TOKENS - n_out, 1, (size_t)n_out);
    const size_t size = (size_t)(n_out * 4 * WIDTH);
    std::vector<float> out(size + 1, -1);
    const es_hidden ask = asked({1, ES_LAST_NORM, 0, 2}, wanted, out);
    check(!es_kernels_keep_hidden(&ask), "asked");
    for (int64_t first = 0; first < TOKENS; first += chunk) {
        const int64_t n = std::min(chunk, TOKENS - first), here = std::max<int64_t>(0, std::min(n, first + n - TOKENS + n_out));
        check(es_kernels_n_hidden() == -1, "not complete yet");
        Model model(first, n);
        check(model.run(n, here, n_threads) == ggml::STATUS_SUCCESS, "run");
    }
    check(es_kernels_n_hidden() == n_out, "all rows");
    for (int64_t r = 0; r < n_out; r++) {
        const float *row = out.data() + r * 4 * WIDTH;
        double sum = 0;
        for (int64_t i = 0; i < WIDTH; i++) {
            const float x = (float)((TOKENS - n_out + r) * WIDTH + i);
            check(row[i] == x + 3 && row[2 * WIDTH + i] == x + 1 && row[3 * WIDTH + i] == x + 4, "a layer's row");
            sum += (double)row[WIDTH + i] * row[WIDTH + i];
        }
        check(sum > WIDTH * 0.999 && sum < WIDTH * 1.001, "the norm's row");
    }
    check(out[size] == -1, "nothing past the end");
    check(!es_kernels_keep_hidden(nullptr) && es_kernels_n_hidden() == -1, "none");
}

void test_refusals() {
    std::vector<uint8_t> wanted(TOKENS, 1);
    std::vector<float> out((size_t)(2 * TOKENS * WIDTH), -1);
    const auto refused = [&](const std::vector<int32_t> &layers, const char *what, void (*change)(es_hidden &)) {
        es_hidden ask = asked(layers, wanted, out);
        change(ask);
        check(es_kernels_keep_hidden(&ask) == -1 && es_kernels_n_hidden() == -1, what);
    };
    refused({LAYERS}, "a layer that is not there", [](es_hidden &) {});
    refused({-2}, "a negative layer", [](es_hidden &) {});
    refused({0}, "no layers", [](es_hidden &ask) { ask.n_layers = 0; });
    refused({0}, "too many layers", [](es_hidden &ask) { ask.n_layers = ES_MOST_HIDDEN + 1; });
    refused({0, 1}, "too few rows", [](es_hidden &ask) { ask.capacity--; });
    refused({0}, "no tokens", [](es_hidden &ask) { ask.n_tokens = 0; });
    refused({0}, "no width", [](es_hidden &ask) { ask.width = 0; });
    refused({0}, "no room", [](es_hidden &ask) { ask.out = nullptr; });
}

// More tokens than were announced, fewer, other widths: nothing is written that was not asked for.
void test_misfits() {
    const auto left = [](int64_t n_announced, int64_t width, int64_t n_out) {
        std::vector<uint8_t> wanted((size_t)n_announced, 1);
        std::vector<float> out((size_t)(2 * n_announced * WIDTH), -1);
        es_hidden ask = asked({0, ES_LAST_NORM}, wanted, out);
        ask.width = width;
        check(!es_kernels_keep_hidden(&ask), "asked");
        Model model(0, TOKENS);
        check(model.run(TOKENS, n_out, 2) == ggml::STATUS_SUCCESS, "run");
        return es_kernels_n_hidden();
    };
    check(left(TOKENS, WIDTH, TOKENS) == TOKENS, "what fits");
    check(left(TOKENS - 1, WIDTH, TOKENS - 1) == -1, "more tokens");
    check(left(TOKENS + 1, WIDTH, TOKENS) == -1, "fewer tokens");
    check(left(TOKENS, WIDTH - 8, TOKENS) == -1, "another width");
    check(left(TOKENS, WIDTH, TOKENS - 1) == -1, "fewer logits than were wanted");
    es_kernels_keep_hidden(nullptr);
}

} // namespace

int main() {
    for (int n_threads = 1; n_threads <= 4; n_threads++) {
        for (const int64_t chunk : {TOKENS, (int64_t)5, (int64_t)1}) {
            test_rows(chunk, TOKENS, n_threads);
            test_rows(chunk, 4, n_threads);
            test_rows(chunk, 1, n_threads);
        }
    }
    test_refusals();
    test_misfits();
    return 0;
}
