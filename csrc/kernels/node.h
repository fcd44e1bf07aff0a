// The device of a node (`edgespec node`): a complete backend, where no scheduler of ggml shares out the work.
//
// llama.cpp's RPC server gives all nodes of a graph to one backend, and all tensors to its buffer type. This one runs
// what the kernels can run, and hands each run of other nodes to llama.cpp's CPU backend, over the same memory.
#pragma once

#include "graph.h"

namespace edgespec {

struct NodeFacts {
    size_t limit, used;             // bytes
    int64_t n_packed, packed_bytes; // weights that the kernels multiply now
    int64_t n_run, n_handed_on;     // operations since the process began: by the kernels, by the CPU backend
};

// The process's one such device. Its buffers hold `memory` bytes at the most; `cpu` is llama.cpp's own device.
ggml::Device *node_device(const Isa &isa, Prefetch prefetch, const Ggml &ggml, ggml::Device *cpu, size_t memory);
NodeFacts node_facts();

} // namespace edgespec
