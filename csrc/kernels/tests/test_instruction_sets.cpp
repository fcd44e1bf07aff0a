// Products of all types are the same bits on all instruction sets of this processor, with 1 to 9 tokens; and unpacking
// gives back what was packed. Under qemu this is the test of what no processor here has (tests/pi/test_pi_wheels.py).
// Types whose tables are ggml's are left out unless its library is given: test_instruction_sets [libggml-base.so].
#include "../codebooks.h"
#include "../edgespec_kernels.h"
#include "../weights.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

using namespace edgespec;

namespace {

constexpr int64_t ROWS = 39, MOST = 9; // neither fills groups of rows or pairs of tokens
const char *const NAMES[] = {"avx512-bf16", "avx512-vnni", "avx-vnni", "avx2", "neon-i8mm", "neon-dotprod", "neon"};

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
        for (int64_t n = 1; n < MOST; n++) {
            multiply(n, fewer);
            check(!memcmp(fewer.data(), y.data(), fewer.size() * 4), format.name, isa, "the same with fewer tokens");
        }
        first = first.empty() ? y : first;
        check(!memcmp(first.data(), y.data(), y.size() * 4), format.name, isa, "the same as on the others");
    }
    check(!first.empty(), format.name, "all", "an instruction set");
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
    return 0;
}
