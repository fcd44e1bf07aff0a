// Attention of every token to every other one, without a mask: an encoder's, or a decoder's to what an encoder heard.
// Its keys and values are packed like weights, so that both products are those of matmul.h, with numbers of 8 bits;
// what lies between is float32. Keys and values in float32 are packed for the operation alone. A copy into a tensor of
// type I8 packs its rows once, for many operations: keys as they are, values transposed.
#pragma once

#include "ggml_abi.h"
#include "isa.h"

namespace edgespec {

// Rows of floats, packed like weights of 8 bits: whole groups, zeros up to a whole block.
struct PackedRows {
    static constexpr Type TYPE = Q8_0;
    int64_t columns, rows, groups, bytes_of_group;
    int lanes;

    PackedRows(int64_t n_columns, int64_t n_rows, int n_lanes)
        : columns((n_columns + 31) / 32 * 32), rows(n_rows), groups(n_groups(n_rows, n_lanes)),
          bytes_of_group(group_bytes(TYPE, columns, n_lanes)), lanes(n_lanes) {}

    int64_t bytes() const { return groups * bytes_of_group; }
    // Of any instruction set, at most.
    static int64_t most_bytes(int64_t columns, int64_t rows) { return PackedRows(columns, rows, MAX_LANES).bytes(); }
    // What a thread needs to pack: a group as floats, and as blocks.
    size_t float_bytes() const { return whole_lines((size_t)(columns * lanes) * sizeof(float)); }
    size_t scratch_bytes() const { return float_bytes() + whole_lines((size_t)(row_bytes(TYPE, columns) * lanes)); }

    // Rows of a group from x on: `row` and `column` are the bytes to the next ones, `n_columns` those that there are.
    void pack(const Isa &isa, int64_t group, const char *x, size_t row, size_t column, int64_t n_columns, char *scratch,
              uint8_t *packed) const;

    static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
};

// Where a head's packed keys and values lie, and a thread's scratch memory: offsets in bytes.
struct FullAttention {
    int64_t head_dim, value_dim, n_heads, n, n_seen;
    PackedRows keys, values; // rows of the values are dimensions

    FullAttention(const ggml::Tensor *op, const Isa &isa);

    // Whether `op`, an attention, is one of these.
    static bool fits(const ggml::Tensor *op);
    // Whether `op`, a copy, packs rows.
    static bool packs(const ggml::Tensor *op);

    int64_t n_tiles() const { return (n + MAX_TILE - 1) / MAX_TILE; }
    size_t head_bytes() const { return (size_t)(keys.bytes() + values.bytes()); }
    // Of each thread: the tile's queries and weights as activations, its scores; or what is about to be packed.
    size_t query_bytes() const { return act_bytes(head_dim); }
    size_t weight_bytes() const { return act_bytes(values.columns); }
    size_t score_bytes() const { return PackedRows::whole_lines((size_t)(values.columns * MAX_TILE) * sizeof(float)); }
    size_t thread_bytes() const;
    size_t bytes(int n_threads) const { return packed_bytes() + (size_t)n_threads * thread_bytes(); }
    size_t packed_bytes() const { return PackedRows::whole_lines((size_t)n_heads * head_bytes()); }

  private:
    static size_t act_bytes(int64_t columns) {
        return PackedRows::whole_lines((size_t)(n_steps(columns) * record_bytes(BYTES_32, MAX_TILE)));
    }
};

} // namespace edgespec
