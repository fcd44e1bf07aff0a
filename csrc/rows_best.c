/* Which compiled copy of rows.c and of product.c this CPU runs. */
#include "product.h"
#include "rows.h"

#ifdef ES_HAVE_X86_LEVELS
/* The level of x86-64 that this CPU has: 4, 3, or 0 for less. */
static int level(void) {
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    return v4 ? 4 : v3 ? 3 : 0;
}
#endif

const es_rows *es_rows_best(void) {
#ifdef ES_HAVE_X86_LEVELS
    if (level() == 4) return &es_rows_x86_64_v4;
    if (level() == 3) return &es_rows_x86_64_v3;
#endif
    return &es_rows_baseline;
}

const es_product *es_product_best(void) {
#ifdef ES_HAVE_X86_LEVELS
    if (level() == 4) return &es_product_x86_64_v4;
    if (level() == 3) return &es_product_x86_64_v3;
#endif
    return &es_product_baseline;
}
