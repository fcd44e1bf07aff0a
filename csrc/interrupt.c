#define _POSIX_C_SOURCE 200809L
#include "interrupt.h"

#include <poll.h>

bool es_interrupted(void *data) {
    es_interrupt *interrupt = data;
    if (++interrupt->asked % ES_INTERRUPT_EVERY) return false;
    struct pollfd wakeup = {.fd = interrupt->fd, .events = POLLIN};
    return poll(&wakeup, 1, 0) == 1 && (wakeup.revents & POLLIN);
}
