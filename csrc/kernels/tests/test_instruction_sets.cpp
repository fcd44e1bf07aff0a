// Products of all types are the same bits on all instruction sets of this processor, with 1 to 9 tokens and more; and unpacking
// gives back what was packed. Under qemu this is the test of what no processor here has (tests/pi/test_pi_wheels.py).
// An encoder's attention and its activation are near what they stand for on all of them.
// Types whose tables are ggml's are left out unless its library is given: test_instruction_sets [libggml-base.so].
#include "../codebooks.h"
#include "../edgespec_kernels.h"
#include "../weights.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

using namespace edgespec;

namespace {

constexpr int64_t ROWS = 39, MOST = 69; // neither fills groups of rows or pairs of tokens
constexpr int64_t TOKENS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 49, 64, 65}; // fewer
const char *const NAMES[] = {"amx-int8", "avx512-bf16", "avx512-vnni", "avx-vnni", "avx2", "avx2-tiles",
                             "neon-i8mm", "neon-dotprod", "neon"};

uint32_t state = 1;
uint32_t next() { return state = state * 1664525u + 1013904223u; }

void check(bool ok, const char *type, const char *isa, const char *what) {
    if (!ok) {
        fprintf(stderr, "failed: %s on %s: %s\n", type, isa, what);
        exit(1);
    }
}

void test(const Format &format) {
    const int64_t columns = format.block == 32 ? 224 : 3 * format.block; // 7 steps: the last packet is not full
    std::vector<uint8_t> weights((size_t)(ROWS * columns / format.block * format.block_bytes)), again(weights.size());
    std::vector<float> x((size_t)(columns * MOST)), first, y((size_t)(ROWS * MOST)), fewer;
    for (uint8_t &byte : weights) {
        byte = (uint8_t)(next() >> 24) & 0x3F; // scales are small and positive
    }
    for (float &number : x) {
        number = (float)(next() >> 8) / (1 << 23) - 1;
    }
    for (const char *isa : NAMES) {
        if (es_kernels_set_isa(isa)) {
            continue;
        }
        const auto multiply = [&](int64_t n, std::vector<float> &out) {
            out.assign((size_t)(ROWS * n), 0);
            check(!es_kernels_matmul(format.ggml_type, ROWS, columns, weights.data(), weights.size(), n, x.data(),
                                     out.data(), 1),
                  format.name, isa, "matmul");
        };
        const auto repack = [&](const std::vector<uint8_t> &from, std::vector<uint8_t> &to) {
            to.assign(from.size(), 0xFF);
            check(!es_kernels_repack(format.ggml_type, ROWS, columns, from.data(), from.size(), to.data()), format.name,
                  isa, "repack");
        };
        repack(weights, again);
        if (first.empty() && !strcmp(format.name, "tq1_0")) { // bytes that no five numbers of three values give
            weights = again;
            repack(weights, again);
        }
        check(again == weights, format.name, isa, "unpacked as it was");
        multiply(MOST, y);
        for (const int64_t n : TOKENS) {
            multiply(n, fewer);
            check(!memcmp(fewer.data(), y.data(), fewer.size() * 4), format.name, isa, "the same with fewer tokens");
        }
        first = first.empty() ? y : first;
        check(!memcmp(first.data(), y.data(), y.size() * 4), format.name, isa, "the same as on the others");
    }
    check(!first.empty(), format.name, "all", "an instruction set");
}

float uniform() { return (float)(next() >> 8) / (1 << 23) - 1; }

void test_full_attention(const char *isa) {
    constexpr int64_t N = 11, SEEN = 75, HEADS = 2, DIM = 32;
    std::vector<float> q((size_t)(N * HEADS * DIM)), k((size_t)(SEEN * HEADS * DIM)), v(k.size()), out(q.size());
    for (std::vector<float> *numbers : {&q, &k, &v}) {
        for (float &number : *numbers) {
            number = 2 * uniform();
        }
    }
    es_attention asked = {};
    asked.head_dim = asked.value_dim = DIM;
    asked.n_head = asked.n_head_kv = HEADS;
    asked.n = N;
    asked.n_kv = SEEN;
    asked.q = q.data();
    asked.k = k.data();
    asked.v = v.data();
    asked.scale = 0.2f;
    check(!es_kernels_attention(&asked, out.data(), 2), "full attention", isa, "run");
    double off = 0, all = 0;
    for (int64_t t = 0; t < N * HEADS; t++) {
        double sum = 0, expected[DIM] = {};
        for (int64_t j = 0; j < SEEN; j++) {
            const int64_t row = (j * HEADS + t % HEADS) * DIM;
            double score = 0;
            for (int64_t d = 0; d < DIM; d++) {
                score += (double)q[(size_t)(t * DIM + d)] * k[(size_t)(row + d)];
            }
            const double weight = exp(0.2 * score);
            sum += weight;
            for (int64_t d = 0; d < DIM; d++) {
                expected[d] += weight * v[(size_t)(row + d)];
            }
        }
        for (int64_t d = 0; d < DIM; d++) {
            const double exact = expected[d] / sum, error = out[(size_t)(t * DIM + d)] - exact;
            off += error * error;
            all += exact * exact;
        }
    }
    check(sqrt(off / all) < 0.02, "full attention", isa, "near the softmax of the scores");
}

void test_gelu(const char *isa) {
    std::vector<float> x(1001), y(x.size());
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = ((float)i - 500) / 60;
    }
    check(!es_kernels_unary(16, (int64_t)x.size(), x.data(), y.data()), "gelu", isa, "run");
    for (size_t i = 0; i < x.size(); i++) {
        check(fabs(y[i] - 0.5 * x[i] * erfc(-x[i] / sqrt(2.0))) < 2e-6, "gelu", isa, "near the error function's");
    }
}

} // namespace

int main(int n_arguments, char **arguments) {
    const char *const best = es_kernels_isa();
    printf("%s\n", best);
    const bool has_tables = n_arguments > 1;
    if (has_tables && !dlopen(arguments[1], RTLD_NOW)) { // before the first table is asked for
        fprintf(stderr, "failed: %s\n", dlerror());
        return 1;
    }
    for (const Format &format : FORMATS) {
        if (has_tables || !is_coded(find_type(format.ggml_type))) {
            test(format);
        }
    }
    for (const char *isa : NAMES) {
        if (!es_kernels_set_isa(isa)) {
            test_full_attention(isa);
            test_gelu(isa);
        }
    }
    return 0;
}
