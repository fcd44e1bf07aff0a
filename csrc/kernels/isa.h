// The kernels of one instruction set, as a table of functions; isa.cpp, matmul_*.cpp and wide.cpp are compiled once for each.
//
// Every kernel computes an output from its inputs in one fixed order of operations, whatever the number of
// tokens beside it: *batch invariance*, which the exactness of a greedy stream rests on.
#pragma once

#include "weights.h"

namespace edgespec {

constexpr int MAX_TILE = 8;         // tokens that share one pass over a group of weights
constexpr int LEAST_WIDE = 16, WIDE_TILE = 64; // and of a wide tile, for tile registers
constexpr int PANEL_TILES = 4;      // most tiles of a prompt that share one unpacking of weights
constexpr int ATTN_ROWS = 96;       // most (token, head) rows of one attention unit
constexpr int ATTN_BLOCK = 64;      // cached tokens of one round of the online softmax
constexpr int ATTN_SEGMENT = 256;   // cached tokens whose partial results are merged in a second round
constexpr int MAX_HEAD_DIM = 576;   // of keys; that of MLA

// How a cache holds keys and values. In Q8_0 and Q4_0, 32 numbers are an F16 scale, then int8; or 4 bits each, less 8: a
// byte has number i in its low half, i + 16 in its high one.
enum CacheFormat { F16_CACHE, Q8_CACHE, Q4_CACHE, N_CACHES };
constexpr int CACHE_BLOCK[N_CACHES] = {64, 34, 18}; // bytes of 32 numbers

// Activations of a tile of nc tokens, quantized: for each step of 32 columns a record of nc x 32 int8 (token by token;
// in pairs of tokens for an instruction set with paired weights, see pairs.h), then
// four times nc numbers: their scale d; and, S being minus the sum of the int8 and a, b its halves of 16 columns,
//     for the simple types  d (float), 8 S, d S (float), 8 a;
//     for the K types       in even steps d (float), 32 a, 32 b, S of this step and of the next one (16 bits each),
//                           in odd ones a and b of this step (16 bits each), 32 a, 32 b, a and b of the step before.
// Those with a factor are int32, or as the instruction set starts its sums (ByteSums).
// In a wide tile two steps are together: their nc x 64 int8, token by token, then the numbers of both.
// As floats: nc x 32 of them; or nc x 32 of BF16, then as much of nothing, where the processor multiplies these.
constexpr int64_t record_bytes(Acts acts, int64_t nc) { return (acts == BYTES_32 || acts == BYTES_256 ? 48 : 128) * nc; }
// Steps of `columns` columns: whole packets of the simple types; the others have whole ones anyway.
constexpr int64_t n_steps(int64_t columns) { return (columns + 63) / 64 * 2; }

// How weights are fetched ahead of their use: by so many bytes, into the first level of cache (past the others) or
// into the second. No result depends on it; which is fastest is the machine's.
constexpr int PREFETCH_LEVELS = 2;
struct Prefetch {
    int level = 2;
    int64_t bytes = 8192;

    bool is_possible() const { return level >= 1 && level <= PREFETCH_LEVELS && bytes >= 0 && bytes <= 1 << 20; }
};

// Products of token c go to y[c][first] .. y[c][first + rows - 1]. `ahead`: a Prefetch's bytes.
typedef void MatmulFn(const uint8_t *group, int64_t packets, const int8_t *acts, float *const *y, int64_t first,
                      int rows, int64_t ahead);
typedef void WideMatmulFn(const uint8_t *group, int64_t packets, const int8_t *acts, int nc, float *const *y,
                          int64_t first, int rows, int64_t ahead);
struct WideTable {
    WideMatmulFn *of[N_TYPES]; // none for floats
};
// The same for any number of rows, whose groups follow each other, and for up to PANEL_TILES tiles of MAX_TILE tokens.
typedef void PanelFn(const uint8_t *group, int64_t packets, const int8_t *acts, int tiles, float *const *y, int64_t first,
                     int64_t rows);
struct MatmulTable {
    MatmulFn *of[N_TYPES][MAX_TILE]; // by the tokens of a tile, less one
    PanelFn *panel[Q6_K - Q2_K + 1]; // nullptr: tiles are multiplied one by one
    PanelFn *panel_of(Type type) const { return type >= Q2_K && type <= Q6_K ? panel[type - Q2_K] : nullptr; }
};

// The cells of a block of ATTN_BLOCK places, of which [first, last) are seen; the others repeat the nearest cell, so
// that all can be read.
struct CellBlock {
    int32_t cells[ATTN_BLOCK];
    int32_t first, last;
    bool are_neighbours; // those that are seen follow each other
};

// One unit of attention: `rows` (token, head) rows that share a head of the cache. Each sees places [start, end) of
// its sequence; which cells these are: views.h.
struct AttentionUnit {
    int64_t head_dim, value_dim; // of queries and keys; of values and outputs
    int rows;
    const float *q[ATTN_ROWS]; // head_dim floats each
    int64_t start[ATTN_ROWS], end[ATTN_ROWS];
    const int32_t *block_ids[ATTN_ROWS]; // of the blocks from start / ATTN_BLOCK on
    const CellBlock *blocks;
    const uint16_t *mask[ATTN_ROWS]; // F16, by cell: added to the scores; all nullptr where it only hides
    const char *k, *v;               // rows of the head, k_stride and v_stride bytes apart
    CacheFormat cache;
    int64_t k_stride, v_stride;
    float scale;
    float soft_cap; // scores become soft_cap tanh(score / soft_cap); 0: they stay
};
// A block whose keys and values are read after a unit's, maybe of another head; nullptr: not known.
struct BlockAhead {
    const CellBlock *block = nullptr;
    const char *k = nullptr, *v = nullptr;
};
// What its rows have seen: largest score, sum of the weights, weighted sum of the values (row r at r * value_dim).
struct AttentionState {
    float *max, *sum, *out;

    static size_t n_floats(int64_t value_dim, int rows) { return (size_t)((value_dim + 2) * rows + 15) / 16 * 16; }
    static AttentionState at(float *memory, int64_t value_dim, int rows) {
        return {memory + value_dim * rows, memory + (value_dim + 1) * rows, memory};
    }
};

// One head of a gated delta net and the tokens of a sequence; strides in floats, from token to token.
struct DeltaNet {
    int64_t width, tokens;
    const float *q, *k, *v, *beta;
    int64_t q_stride, k_stride, v_stride, beta_stride;
    const float *decay; // of each token, or of each token and column
    bool by_column;
    float scale;
    const float *state; // [width][width]
    float *y, *states;  // the state after token i goes to slot tokens - 1 - i, if there is one
    int64_t y_stride, slots, slot_stride;
};
// One head of a state space (Mamba-2).
struct StateScan {
    int64_t width, tokens;
    const float *x, *b, *c;
    int64_t x_stride, b_stride, c_stride;
    const float *decay, *step; // of each token
    const float *state;        // [rows][width]
    float *y, *states;
    int64_t y_stride, slots, slot_stride;
};

typedef void BinaryFn(int64_t n, const float *a, const float *b, float *y);
typedef void UnaryFn(int64_t n, const float *x, float a, float b, float *y);
typedef void GatedFn(int64_t n, const float *gate, const float *x, float alpha, float limit, float *y);

struct Isa {
    const char *name;
    Layout layout;
    // Bring blocks [block0, block1) (of act_columns) of x into column c of a tile of nc.
    void (*quantize)(const float *x, int64_t columns, Acts acts, int64_t block0, int64_t block1, int8_t *tile, int nc,
                     int c);
    const MatmulTable *matmul[PREFETCH_LEVELS];
    const WideTable *wide; // of LEAST_WIDE to WIDE_TILE tokens; nullptr: no tile registers
    // Set the state to what places [begin, end) give, at most a segment; both are multiples of ATTN_BLOCK.
    void (*attend)(const AttentionUnit &unit, int64_t begin, int64_t end, const AttentionState &state,
                   const BlockAhead &ahead);
    // Row r of `part` joins row r of `total`.
    void (*merge)(int64_t value_dim, int rows, const AttentionState &part, const AttentionState &total);

    // Rows [first, last) of a state.
    void (*delta_net)(const DeltaNet &net, int64_t first, int64_t last);      // of 16, 32, 64 or 128 columns
    void (*state_scan)(const StateScan &scan, int64_t first, int64_t last);   // or of 256

    // ---- rows of n floats; y may be x ----
    void (*rms_norm)(int64_t n, const float *x, float eps, float *y);
    void (*norm)(int64_t n, const float *x, float eps, float *y);    // mean 0, variance 1
    void (*l2_norm)(int64_t n, const float *x, float eps, float *y); // length 1
    BinaryFn *add, *sub, *mul, *divide;
    UnaryFn *scale; // a x + b
    UnaryFn *clamp; // to a .. b
    UnaryFn *square, *square_root, *negative, *exponential, *relu, *tanh, *sigmoid, *silu, *gelu, *gelu_erf;
    GatedFn *reglu, *geglu, *swiglu, *swiglu_oai, *geglu_quick, *swiglu_clamp;
    float (*sum)(int64_t n, const float *x);
    // Of factor x.
    void (*soft_max)(int64_t n, const float *x, float factor, float *y);
    // y[i] = w . x[i], for at most MAX_TILE of them.
    void (*dots)(int64_t n, const float *w, const float *const *x, int count, float *y);
    void (*to_half)(int64_t n, const float *x, uint16_t *y);
    void (*to_q8)(int64_t n, const float *x, uint8_t *y); // Q8_0; n is a multiple of 32
    void (*to_q4)(int64_t n, const float *x, uint8_t *y); // Q4_0
    // Each `n` of `count` floats times the Hadamard matrix over sqrt(n), by Walsh's transform; n: a power of two, at least 64.
    void (*hadamard)(int64_t n, int64_t count, const float *x, float *y);
    // Rotate pairs (i, i + n/2) of n floats, or (2i, 2i + 1) if not `halves`, by n/2 angles.
    void (*rope)(int64_t n, bool halves, const float *x, const float *cosines, const float *sines, float *y);

    // ---- what a core can do at the most, to be timed ----
    // Read a multiple of 1024 bytes and return something made of all.
    int32_t (*read)(const uint8_t *p, int64_t bytes, const Prefetch &prefetch);
    // Multiply from registers, so many rounds; returns the number of multiply-adds.
    int64_t (*peak)(int64_t rounds);
};

// The best table for this CPU, or nullptr; one by name, or nullptr when unknown or not for this CPU.
const Isa *best_isa();
const Isa *find_isa(const char *name);

// What Linux says to a process that wants AMX's tile registers: 0, it may use them; an errno; NO_TILES: there are none.
constexpr int NO_TILES = -1;
int ask_for_tiles();
// From how many tokens on products of this instruction set go through wide tiles; INT64_MAX: never, as when Linux does not
// permit tile registers any more.
int64_t wide_from(const Isa &isa);
// Choose that number, LEAST_WIDE or more; 0: never. False: another one, and nothing is changed.
bool set_wide_from(int64_t tokens);

} // namespace edgespec
