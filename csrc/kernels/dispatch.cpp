// Which instruction sets this CPU has, of those that are compiled (ES_HAVE_..., CMakeLists.txt).
#include "isa.h"

#include <errno.h>
#include <string.h>

#include <atomic>

#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
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

int ask_for_tiles() { return NO_TILES; }
#else
extern const Isa ISA_AMX_INT8, ISA_AVX2_TILES, ISA_AVX512_BF16, ISA_AVX512_VNNI, ISA_AVX_VNNI, ISA_AVX2;

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
[[maybe_unused]] bool has_amx_int8() { // as at first: where tiles are lost later, it goes on without them
    static const int answer = ask_for_tiles();
    return has_avx512_bf16() && !answer;
}

const Choice CHOICES[] = {
#ifdef ES_HAVE_AVX512_VNNI
    {&ISA_AMX_INT8, has_amx_int8}, {&ISA_AVX512_BF16, has_avx512_bf16}, {&ISA_AVX512_VNNI, has_avx512_vnni},
#endif
#ifdef ES_HAVE_AVX_VNNI
    {&ISA_AVX_VNNI, has_avx_vnni},
#endif
    {&ISA_AVX2, has_avx2}, {&ISA_AVX2_TILES, has_avx2}}; // the last one for tests: tiles in C

} // namespace

int ask_for_tiles() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18; // of Linux's <asm/prctl.h>, from 5.16 on
    constexpr unsigned AMX = 1 << 24 | 1 << 25;     // tiles and int8
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & AMX) != AMX) {
        return NO_TILES;
    }
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) ? errno : 0;
}
#endif

namespace {
std::atomic<int64_t> chosen_wide_from{LEAST_WIDE};
}

int64_t wide_from(const Isa &isa) {
    const bool may = isa.wide && (!strcmp(isa.name, "avx2-tiles") || !ask_for_tiles());
    const int64_t from = chosen_wide_from.load(std::memory_order_relaxed);
    return may && from ? from : INT64_MAX;
}

bool set_wide_from(int64_t tokens) {
    const bool can_be = !tokens || tokens >= LEAST_WIDE;
    if (can_be) {
        chosen_wide_from.store(tokens, std::memory_order_relaxed);
    }
    return can_be;
}

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
