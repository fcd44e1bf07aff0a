// Weight formats: how quantized matrices are laid out in files (ggml's blocks) and in memory (packed).
//
// A packed matrix is a row of *groups* of R rows (R = lanes of the instruction set: 16, 8 or 4). A group is
// one strictly sequential stream of *packets*, in the order in which the kernels use it:
//
//     packet = header: scales of all its steps, R at a time
//              step 0, step 1, ...: 32 columns x R rows each
//     step   = planes of R x 4 bytes; row r owns bytes 4r .. 4r+3, one byte for each of 4 columns:
//              nibbles:  4 planes, plane v: columns 4v.. in the low and 16+4v.. in the high nibble
//              3 bits:   3 planes, plane v: columns 4v.. in bits 0..2, 12+4v.. in bits 3..5; bits 6 and 7 of
//                        plane h = 0, 1: the low two bits of columns 24+4h.., of plane 2: the high bits of both
//              1 bit:    1 plane,  bit v of a byte: column 4v.. (v = 0..7)
//              2 bits:   2 planes, plane h, bits 2v..2v+1: column 16h+4v.. (v = 0..3)
//              bytes:    8 planes, plane v: columns 4v..
//              F16:      32 planes of R x 2 bytes, plane v: column v
//              BF16:     16 planes, plane v: columns 2v and 2v+1
//
// Paired (groups of 4 rows, for instructions that multiply 2 rows by 8 columns; all types but F16 and BF16): the 4
// bytes of column 4v.. of the rows a, b, c, d, and those of column 4v+4.. (v even), are no longer abcd and ABCD but
// aAbB and cCdD: what 8 columns of two rows have is in one place.
//
// Header, each item R times: simple types (2 steps): F16 d of step 0, d of step 1, then m of both if the
// type has minima; MXFP4: a byte for each step, its exponent; NVFP4: a byte for each 16 columns, E4M3. Q1_0 (4 steps)
// and Q2_0 (2): F16 d. F16 and BF16 (1 step): none. K types (8 steps): F16 d, F16 dmin, 16 bytes of scales: 8 scales and 8 minima of 32 columns (Q4_K,
// Q5_K), 16 signed scales of 16 columns (Q3_K, Q6_K, dmin unused), or 16 times a scale in the low and a minimum in the
// high nibble (Q2_K). IQ types (8 steps): F16 d and a byte for the scale of each 32 or 16 columns (IQ1_M, IQ2_XS,
// IQ2_S), signed in IQ4_XS and else odd. Ternary types (8 steps): F16 d. What the quants of
// IQ1, IQ2 and IQ3 stand for: codebooks.h.
// Rows and columns missing at the end are zeros. Packing loses nothing: unpack gives the same blocks.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace edgespec {

enum Type {
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, NVFP4, Q1_0, Q2_0,
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, TQ1_0, TQ2_0,
    IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S,
    F16, BF16, N_TYPES
};

// How activations go into a product: 8 bits under one scale for each 32 or 256 columns, or as floats, which for BF16
// weights are rounded to BF16.
enum Acts { BYTES_32, BYTES_256, FLOATS, ROUNDED_FLOATS };
inline int act_columns(Acts acts) { return acts == BYTES_256 ? 256 : 32; } // of a block of activations

struct Format {
    const char *name; // ggml's
    int ggml_type;
    int block;         // columns of a ggml block
    int block_bytes;
    int steps;         // of a packet
    int header;        // bytes for each row of a packet's header
    int step;          // bytes for each row of a step
    Acts acts;
    bool two_scales = false; // of a step of an IQ type
};

constexpr Format FORMATS[N_TYPES] = {
    {"q4_0", 2, 32, 18, 2, 4, 16, BYTES_32},      {"q4_1", 3, 32, 20, 2, 8, 16, BYTES_32},
    {"q5_0", 6, 32, 22, 2, 4, 20, BYTES_32},      {"q5_1", 7, 32, 24, 2, 8, 20, BYTES_32},
    {"q8_0", 8, 32, 34, 2, 4, 32, BYTES_32},      {"iq4_nl", 20, 32, 18, 2, 4, 16, BYTES_32},
    {"mxfp4", 39, 32, 17, 2, 2, 16, BYTES_32},    {"nvfp4", 40, 64, 36, 2, 4, 16, BYTES_32},
    {"q1_0", 41, 128, 18, 4, 2, 4, BYTES_32},     {"q2_0", 42, 64, 18, 2, 2, 8, BYTES_32},
    {"q2_K", 10, 256, 84, 8, 20, 8, BYTES_256},   {"q3_K", 11, 256, 110, 8, 20, 12, BYTES_256},
    {"q4_K", 12, 256, 144, 8, 20, 16, BYTES_256}, {"q5_K", 13, 256, 176, 8, 20, 20, BYTES_256},
    {"q6_K", 14, 256, 210, 8, 20, 24, BYTES_256}, {"iq4_xs", 23, 256, 136, 8, 10, 16, BYTES_256},
    {"tq1_0", 34, 256, 54, 8, 2, 8, BYTES_256},   {"tq2_0", 35, 256, 66, 8, 2, 8, BYTES_256},
    {"iq1_s", 19, 256, 50, 8, 10, 12, BYTES_256}, {"iq1_m", 29, 256, 56, 8, 18, 12, BYTES_256, true},
    {"iq2_xxs", 16, 256, 66, 8, 10, 12, BYTES_256},
    {"iq2_xs", 17, 256, 74, 8, 18, 12, BYTES_256, true},
    {"iq2_s", 22, 256, 82, 8, 18, 12, BYTES_256, true},
    {"iq3_xxs", 18, 256, 98, 8, 10, 16, BYTES_256},
    {"iq3_s", 21, 256, 110, 8, 10, 16, BYTES_256},
    {"f16", 1, 32, 64, 1, 0, 64, FLOATS},         {"bf16", 30, 32, 64, 1, 0, 64, ROUNDED_FLOATS},
};

// The format of a ggml type, or N_TYPES.
Type find_type(int ggml_type);

inline int64_t n_packets(Type type, int64_t columns) {
    const int64_t packet = FORMATS[type].steps * 32;
    return (columns + packet - 1) / packet;
}
inline int64_t row_bytes(Type type, int64_t columns) {
    return columns / FORMATS[type].block * FORMATS[type].block_bytes;
}
// Bytes of a packed group of `lanes` rows.
inline int64_t group_bytes(Type type, int64_t columns, int lanes) {
    const Format &f = FORMATS[type];
    return n_packets(type, columns) * (f.header + f.steps * f.step) * lanes;
}
inline int64_t n_groups(int64_t rows, int lanes) { return (rows + lanes - 1) / lanes; }

constexpr int MAX_LANES = 16; // of all instruction sets

// How an instruction set wants its weights.
struct Layout {
    int lanes;
    bool signed_bytes; // else 8-bit types have the sign bit flipped
    bool paired;       // 8 columns of two rows side by side
};

// Pack the group of `rows` (<= lanes) rows at `src`, `row_bytes` apart, into group_bytes at `dst`.
void pack_group(Type type, int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst);
// The inverse.
void unpack_group(Type type, int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst);

} // namespace edgespec
