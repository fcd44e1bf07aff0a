// The buffer type of packed weights.
#pragma once

#include "edgespec_kernels.h"
#include "graph.h"

namespace edgespec {

void pack(const Isa &isa, const ggml::Tensor *tensor, const void *blocks);
void unpack(const Isa &isa, const ggml::Tensor *tensor, void *blocks);
size_t packed_size(const Isa &isa, const ggml::Tensor *tensor);
size_t plain_size(const ggml::Tensor *tensor); // as in a file: rows without gaps

} // namespace edgespec
