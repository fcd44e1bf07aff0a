// Whole matrices, packed on all processors. A tensor may have several beside each other: experts, heads.
#pragma once

#include "graph.h"

namespace edgespec {

// Memory for packed weights, to be freed with free(); nullptr: there is none.
constexpr size_t WEIGHTS_ALIGNMENT = 64;
void *alloc_weights(size_t size);

// Fill tensor->data, packed_size bytes, from ggml's blocks, plain_size bytes; and the inverse.
void pack(const Isa &isa, const ggml::Tensor *tensor, const void *blocks);
void unpack(const Isa &isa, const ggml::Tensor *tensor, void *blocks);
size_t packed_size(const Isa &isa, const ggml::Tensor *tensor);
size_t plain_size(const ggml::Tensor *tensor); // as in a file: rows without gaps

} // namespace edgespec
