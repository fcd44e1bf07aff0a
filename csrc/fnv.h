/* The hash by which llama.cpp's RPC server names the weights that it keeps: FNV-1a, 64 bits.
 * Source: G. Fowler, L. C. Noll, K.-P. Vo, D. Eastlake: The FNV Non-Cryptographic Hash Algorithm, draft-eastlake-fnv,
 * section 2. */
#ifndef ES_FNV_H
#define ES_FNV_H

#include <stddef.h>
#include <stdint.h>

#define ES_FNV_BASIS 0xcbf29ce484222325u

/* The hash of what `hash` is of, followed by `size` bytes; begin with ES_FNV_BASIS. */
static inline uint64_t es_fnv1a(const uint8_t *data, size_t size, uint64_t hash) {
    for (size_t i = 0; i < size; i++) hash = (hash ^ data[i]) * 0x100000001b3u;
    return hash;
}

#endif
