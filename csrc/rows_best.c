#include "rows.h"

const es_rows *es_rows_best(void) {
#ifdef ES_HAVE_X86_LEVELS
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    if (v4) return &es_rows_x86_64_v4;
    if (v3) return &es_rows_x86_64_v3;
#endif
    return &es_rows_baseline;
}
