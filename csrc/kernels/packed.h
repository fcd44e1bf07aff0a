// Whole matrices, packed on all processors. A tensor may have several beside each other: experts, heads.
#pragma once

#include "graph.h"

namespace edgespec {

// Memory for packed weights, to be freed with free(); nullptr: there is none.
constexpr size_t WEIGHTS_ALIGNMENT = 64;
void *alloc_weights(size_t size);

// Weights that were packed before: `size` bytes of a file. A private map of them, which may be written to, if they are what
// is asked for; else, and with fd < 0, nullptr.
struct MappedFile {
    int fd = -1;
    int64_t offset = 0, size = 0;
};
void *map_weights(const MappedFile &file, size_t size);
void unmap_weights(void *memory, size_t size);

// Fill tensor->data, packed_size bytes, from ggml's blocks, plain_size bytes; and the inverse.
void pack(const Isa &isa, const ggml::Tensor *tensor, const void *blocks);
void unpack(const Isa &isa, const ggml::Tensor *tensor, void *blocks);
size_t packed_size(const Isa &isa, const ggml::Tensor *tensor);
size_t plain_size(const ggml::Tensor *tensor); // as in a file: rows without gaps

} // namespace edgespec
