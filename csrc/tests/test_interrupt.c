/* The abort callback answers with the descriptor's state, and only at every so many questions. */
#define _POSIX_C_SOURCE 200809L
#include "interrupt.h"

#include "check.h"

#include <unistd.h>

static size_t yes_in(es_interrupt *interrupt, size_t n) {
    size_t yes = 0;
    for (size_t i = 0; i < n; i++) yes += es_interrupted(interrupt);
    return yes;
}

int main(void) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    es_interrupt interrupt = {.fd = ends[0]};
    CHECK(yes_in(&interrupt, 10 * ES_INTERRUPT_EVERY) == 0);
    CHECK(write(ends[1], "", 1) == 1);
    CHECK(yes_in(&interrupt, 10 * ES_INTERRUPT_EVERY) == 10); /* asking reads nothing */
    close(ends[0]);
    close(ends[1]);
    interrupt.fd = -1; /* no descriptor: never */
    CHECK(yes_in(&interrupt, 10 * ES_INTERRUPT_EVERY) == 0);
    return 0;
}
