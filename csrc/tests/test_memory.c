/* Every allocation is made to fail once.  This compiles its own copy of sampler.c over an allocator
 * that counts and refuses. */
#include <stddef.h>

static void *counted_calloc(size_t n, size_t size);
#define ES_CALLOC counted_calloc
#include "../sampler.c"

#include "check.h"

static size_t n_calls, failing_call;

static void *counted_calloc(size_t n, size_t size) { return ++n_calls == failing_call ? NULL : calloc(n, size); }

int main(void) {
    const int32_t breakers[] = {7, 8, -1, 9, -1};
    const es_params params = {.temperature = 1.0f,
                              .top_p = 1.0f,
                              .typical_p = 1.0f,
                              .repeat_penalty = 1.0f,
                              .dry_multiplier = 1.0f,
                              .dry_base = 1.5f,
                              .dry_penalty_last_n = -1,
                              .dry_breakers = breakers,
                              .n_dry_breakers = 5};
    const int32_t ids[] = {1};
    const float values[] = {2.0f}, row[300] = {0};

    es_sampler *s = es_sampler_new(300, 4, &params, ids, values, 1);
    CHECK(s);
    const size_t needed = n_calls;
    CHECK(needed > 0);
    for (failing_call = 1; failing_call <= needed; failing_call++) {
        n_calls = 0;
        CHECK(!es_sampler_new(300, 4, &params, ids, values, 1)); /* LeakSanitizer sees what stays behind */
    }

    /* A size that wraps round is refused like memory that is not there. */
    failing_call = 0;
    CHECK(!es_sampler_new(SIZE_MAX / 4, 4, &params, NULL, NULL, 0));

    /* The loop allocates nothing. */
    n_calls = 0;
    for (size_t slot = 0; slot < 4; slot++) {
        CHECK(es_filter(s, row, 300, NULL, 0, NULL, 0, &s->slots[slot]) == ES_OK);
        CHECK(es_filter(s, row, 300, NULL, 0, NULL, 0, s->target) == ES_OK);
        es_residual(s, s->target, &s->slots[slot], 0.5);
        es_dist_sample(s->target, 0.5);
    }
    CHECK(n_calls == 0);
    es_sampler_free(s);
    es_sampler_free(NULL);
    return 0;
}
