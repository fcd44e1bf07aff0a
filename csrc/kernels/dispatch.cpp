// Which instruction sets this CPU has.
#include "isa.h"

#include <string.h>

namespace edgespec {

extern const Isa ISA_AVX512_VNNI, ISA_AVX_VNNI, ISA_AVX2;

namespace {

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512_vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

const struct {
    const Isa *isa;
    bool (*available)();
} CHOICES[] = {{&ISA_AVX512_VNNI, has_avx512_vnni}, {&ISA_AVX_VNNI, has_avx_vnni}, {&ISA_AVX2, has_avx2}};

} // namespace

const Isa *best_isa() {
    for (const auto &choice : CHOICES) {
        if (choice.available()) {
            return choice.isa;
        }
    }
    return nullptr;
}

const Isa *find_isa(const char *name) {
    for (const auto &choice : CHOICES) {
        if (!strcmp(choice.isa->name, name)) {
            return choice.available() ? choice.isa : nullptr;
        }
    }
    return nullptr;
}

} // namespace edgespec
