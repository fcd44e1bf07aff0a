// Which instruction sets this CPU has, of those that are compiled (ES_HAVE_..., CMakeLists.txt).
#include "isa.h"

#include <string.h>

#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace edgespec {
namespace {

struct Choice {
    const Isa *isa;
    bool (*available)();
};

} // namespace

#ifdef __aarch64__
extern const Isa ISA_NEON_I8MM, ISA_NEON_DOTPROD, ISA_NEON;

namespace {

constexpr unsigned long I8MM = 1 << 13; // in AT_HWCAP2; the kernel's headers before 5.6 do not name it

bool has_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool has_i8mm() { return has_dotprod() && (getauxval(AT_HWCAP2) & I8MM); }
bool has_neon() { return true; } // all 64-bit ARM has it

const Choice CHOICES[] = {
    {&ISA_NEON_I8MM, has_i8mm}, {&ISA_NEON_DOTPROD, has_dotprod}, {&ISA_NEON, has_neon}};

} // namespace
#else
extern const Isa ISA_AVX512_BF16, ISA_AVX512_VNNI, ISA_AVX_VNNI, ISA_AVX2;

namespace {

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
bool has_avx512_vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
[[maybe_unused]] bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

const Choice CHOICES[] = {
#ifdef ES_HAVE_AVX512_VNNI
    {&ISA_AVX512_BF16, has_avx512_bf16}, {&ISA_AVX512_VNNI, has_avx512_vnni},
#endif
#ifdef ES_HAVE_AVX_VNNI
    {&ISA_AVX_VNNI, has_avx_vnni},
#endif
    {&ISA_AVX2, has_avx2}};

} // namespace
#endif

const Isa *best_isa() {
    for (const Choice &choice : CHOICES) {
        if (choice.available()) {
            return choice.isa;
        }
    }
    return nullptr;
}

const Isa *find_isa(const char *name) {
    for (const Choice &choice : CHOICES) {
        if (!strcmp(choice.isa->name, name)) {
            return choice.available() ? choice.isa : nullptr;
        }
    }
    return nullptr;
}

} // namespace edgespec
