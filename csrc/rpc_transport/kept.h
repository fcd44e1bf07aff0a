/* Keeps weights that clients have sent on the server's disk, by their hash (kept.cpp). */
#ifndef EDGESPEC_KEPT_H
#define EDGESPEC_KEPT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* From now on weights are kept in `folder`, as long as `least_free` bytes stay free on its disk. NULL: none are kept, as before
 * the first call. To be called before the server begins, and by one process for a folder. */
void es_rpc_keep_in(const char *folder, uint64_t least_free);

#ifdef __cplusplus
}

namespace edgespec {

/* Puts the bytes into a file of their hash's name, whole or not at all. Where they cannot be kept nothing is said: they are
 * sent again when they are needed. */
void keep(const uint8_t *bytes, size_t size);

} // namespace edgespec
#endif
#endif
