/* Lets Ctrl-C end a llama_decode that is under way.
 *
 * Python's signal handlers wait until the C call returns, but the interpreter's wakeup descriptor
 * (signal.set_wakeup_fd) is written to at once.  ggml asks es_interrupted() after every graph node
 * whether to stop; it answers with whether that descriptor has become readable.  Looking costs a
 * system call, so it does so only at every ES_INTERRUPT_EVERY-th question. */
#ifndef EDGESPEC_INTERRUPT_H
#define EDGESPEC_INTERRUPT_H

#include <stdbool.h>

enum { ES_INTERRUPT_EVERY = 16 };

typedef struct es_interrupt {
    int fd; /* read end of the wakeup pipe; never read here */
    unsigned asked;
} es_interrupt;

/* A ggml_abort_callback; `data` is an es_interrupt.  ggml calls it from one thread only. */
bool es_interrupted(void *data);

#endif
