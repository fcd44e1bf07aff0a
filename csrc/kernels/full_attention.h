// Attention of every token to every other one, without a mask: an encoder's. Its keys and values are packed like
// weights, so that both products are those of matmul.h, with numbers of 8 bits; what lies between is float32.
#pragma once

#include "ggml_abi.h"
#include "isa.h"

namespace edgespec {

// Where a head's packed keys and values lie, and a thread's scratch memory: offsets in bytes.
struct FullAttention {
    static constexpr Type TYPE = Q8_0;
    int64_t head_dim, value_dim, n_heads, n, n_seen;
    int64_t columns; // of the values, whose rows are dimensions: tokens, and zeros up to a whole block
    int64_t key_groups, value_groups, key_group_bytes, value_group_bytes; // packed
    int lanes;

    FullAttention(const ggml::Tensor *op, const Isa &isa);

    // Whether `op`, an attention, is one of these.
    static bool fits(const ggml::Tensor *op);

    int64_t n_tiles() const { return (n + MAX_TILE - 1) / MAX_TILE; }
    size_t head_bytes() const { return (size_t)(key_groups * key_group_bytes + value_groups * value_group_bytes); }
    // Of each thread: the tile's queries and weights as activations, its scores; or what is about to be packed.
    size_t query_bytes() const { return whole_lines((size_t)(n_steps(head_dim) * record_bytes(BYTES_32, MAX_TILE))); }
    size_t weight_bytes() const { return whole_lines((size_t)(n_steps(columns) * record_bytes(BYTES_32, MAX_TILE))); }
    size_t score_bytes() const { return whole_lines((size_t)(columns * MAX_LANES) * sizeof(float)); }
    size_t block_bytes() const { return whole_lines((size_t)(row_bytes(TYPE, columns > head_dim ? columns : head_dim) * MAX_LANES)); }
    size_t thread_bytes() const { return query_bytes() + weight_bytes() + score_bytes() + block_bytes(); }
    size_t bytes(int n_threads) const { return whole_lines((size_t)n_heads * head_bytes()) + (size_t)n_threads * thread_bytes(); }

    static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
};

} // namespace edgespec
