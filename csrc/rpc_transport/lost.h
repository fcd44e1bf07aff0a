/* How long a client of ggml's RPC backend waits for nodes, and which of them it has lost (transport.cpp). */
#ifndef EDGESPEC_LOST_H
#define EDGESPEC_LOST_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* From now on all connections of this process wait `silence_ms` for a byte to come or go; and once the descriptor
 * `interrupt` has become readable (-1: none; it is never read here) `interrupted_ms` for what is under way. */
void es_rpc_patience(int interrupt, int silence_ms, int interrupted_ms);

/* Returns 1 if a connection to `endpoint` ("127.0.0.1:50052") was lost, and writes why into `reason`, cut to `size` bytes
 * with the zero at its end; else 0. What llama.cpp computed since with layers on that node means nothing. */
int es_rpc_lost(const char *endpoint, char *reason, size_t size);

/* Lets the next connection to `endpoint` be made. ggml makes one when nothing of a model is left that used the lost one. */
void es_rpc_forget(const char *endpoint);

#ifdef __cplusplus
}
#endif
#endif
