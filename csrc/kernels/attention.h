// Attention of a few query rows over a cache in F16, Q8_0 or Q4_0: an online softmax in float32 (Milakov and Gimelshein,
// arXiv 1805.02867; Dao et al., arXiv 2205.14135). Scores have cached tokens in their lanes, outputs have
// head dimensions: no sum of a score or an output crosses lanes, and a row never meets another row.
#pragma once

constexpr int ROW_TILE = LANES == 16 ? 12 : LANES == 8 ? 6 : 4; // rows of a micro-kernel
constexpr int KEY_VECTORS = LANES == 4 ? 4 : 2;                // vectors of scores for each of its rows
constexpr int KEYS = KEY_VECTORS * LANES; // transposed at once: as floats they stay in the first level of cache
constexpr int DIM_VECTORS = KEY_VECTORS;                       // vectors of outputs
constexpr int DIMS = DIM_VECTORS * LANES;
constexpr int LONE_ROWS = LANES == 4 ? 4 : 6; // so few rows widen the values where they use them
constexpr int LONE_VECTORS = LANES == 8 ? 2 : 4;

// The rows of the cache that are read next, to be fetched into the second level of cache. A core waits for some sixteen
// lines at once and then stops: a few are asked for at a time, all through the work on the block before.
struct Fetch {
    const char *rows[2 * ATTN_BLOCK]; // of keys, then of values
    int bytes[2];                     // of a row of either
    int row = 2 * ATTN_BLOCK, byte = 0;

    inline void lines(int n) {
        for (; n > 0 && row < 2 * ATTN_BLOCK; n--) {
            __builtin_prefetch(rows[row] + byte, 0, 2);
            byte += 64;
            if (byte >= bytes[row / ATTN_BLOCK]) {
                byte = 0;
                row++;
            }
        }
    }
};

// scores[r][0 .. KEYS) = q[r] . keys; keys[d][KEYS] transposed.
template <int ROWS>
void score_rows(int64_t head_dim, const float *const *q, const float *keys, float *scores, Fetch &fetch) {
    F sum[ROWS][KEY_VECTORS];
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < KEY_VECTORS; v++) {
            sum[r][v] = f_zero();
        }
    }
    for (int64_t d = 0; d < head_dim;) {
        fetch.lines(KEYS / 8);
        for (const int64_t end = d + 8 < head_dim ? d + 8 : head_dim; d < end; d++, keys += KEYS) {
            F key[KEY_VECTORS];
            for (int v = 0; v < KEY_VECTORS; v++) {
                key[v] = f_load(keys + v * LANES);
            }
            for (int r = 0; r < ROWS; r++) {
                const F x = f_set1(q[r][d]);
                for (int v = 0; v < KEY_VECTORS; v++) {
                    sum[r][v] = f_fma(x, key[v], sum[r][v]);
                }
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < KEY_VECTORS; v++) {
            f_store(scores + r * ATTN_BLOCK + v * LANES, sum[r][v]);
        }
    }
}

// LANES numbers of a row of the cache from column d, a multiple of LANES, on.
template <CacheFormat CACHE> inline F f_cached(const char *row, int64_t d) {
    if (CACHE == F16_CACHE) {
        return f_half(row + 2 * d);
    }
    const uint8_t *const block = (const uint8_t *)row + d / 32 * CACHE_BLOCK[CACHE];
    const F scale = f_set1(half_at(block));
    return f_mul(CACHE == Q8_CACHE ? f_i8(block + 2 + d % 32) : f_i4(block + 2 + d % 16, d % 32 / 16 * 4), scale);
}

// A block of places: where its keys and values lie, and which of the places are seen.
struct BlockRows {
    const char *keys[ATTN_BLOCK], *values[ATTN_BLOCK];
    const CellBlock *block;
    int64_t begin; // the first place
};

inline void find_rows(const CellBlock &block, const char *base, int64_t stride, const char **rows) {
    if (block.are_neighbours && block.first == 0 && block.last == ATTN_BLOCK) {
        base += block.cells[0] * stride;
        for (int j = 0; j < ATTN_BLOCK; j++) {
            rows[j] = base + j * stride;
        }
    } else {
        for (int j = 0; j < ATTN_BLOCK; j++) {
            rows[j] = base + block.cells[j] * stride;
        }
    }
}

// 8 rows of words become 8 columns, in each 128 bits by themselves.
inline void transpose_words(I *r) {
    I t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = i_low16(r[i], r[i + 1]);
        t[i + 1] = i_high16(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            u[i + 2 * h] = i_low32(t[i + h], t[i + 2 + h]);
            u[i + 2 * h + 1] = i_high32(t[i + h], t[i + 2 + h]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[2 * i] = i_low64(u[i], u[i + 4]);
        r[2 * i + 1] = i_high64(u[i], u[i + 4]);
    }
}

// Columns of F16 keys, transposed as words and widened after that: half the shuffles. Returns how many.
inline int64_t transpose_halves(const char *const *row, int64_t head_dim, float *keys, Fetch &fetch) {
    constexpr int COLUMNS = 2 * LANES;
    // Of words that lie side by side, 8 are written at once and LANES read: so late that none waits to be written.
    alignas(64) uint16_t both[2][COLUMNS * KEYS];
    const auto widen = [&](int64_t d) {
        const uint16_t *const words = both[d / COLUMNS % 2];
        for (int i = 0; i < COLUMNS * KEYS; i += LANES) {
            f_store(keys + d * KEYS + i, f_half(words + i));
        }
    };
    int64_t d = 0;
    for (; d + COLUMNS <= head_dim; d += COLUMNS) {
        uint16_t *const words = both[d / COLUMNS % 2];
        for (int j = 0; j < KEYS; j += 8) {
            fetch.lines(COLUMNS / 8 + 1);
            I r[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                r[i] = i_load(row[j + i] + 2 * d);
            }
            transpose_words(r);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                i_scatter(words + i * KEYS + j, 8 * KEYS, r[i]);
            }
        }
        if (d > 0) {
            widen(d - COLUMNS);
        }
    }
    if (d > 0) {
        widen(d - COLUMNS);
    }
    return d;
}

// The numbers of BITS bits from the N-th on of words of LANES keys, as floats. Number n of a word belongs to column n, in
// Q4_0 to n / 2, and 16 columns later where n is odd.
template <int BITS, int N> inline void widen_words(I words, F scale, float *keys) {
    if constexpr (N < 32 / BITS) {
        const F number = f_int(i_sar32<32 - BITS>(i_shl32<32 - BITS * (N + 1)>(words)));
        f_store(keys + (BITS == 8 ? N : N / 2 + N % 2 * 16) * KEYS, f_mul(number, scale));
        widen_words<BITS, N + 1>(words, scale, keys);
    }
}

// Columns of quantized keys, transposed as words of 4 or 8 numbers and widened after that. Returns how many.
template <CacheFormat CACHE>
int64_t transpose_blocks(const char *const *row, int64_t head_dim, float *keys, Fetch &fetch) {
    constexpr int BITS = CACHE == Q8_CACHE ? 8 : 4, WORDS = BITS; // of a block
    constexpr int COLUMNS = LANES * 32 / BITS, BLOCKS = COLUMNS < 32 ? 1 : COLUMNS / 32;
    int64_t d = 0;
    for (; d + COLUMNS <= head_dim; d += COLUMNS) {
        for (int j = 0; j < KEYS; j += LANES) {
            F t[LANES];
            alignas(64) float scales[BLOCKS][LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const uint8_t *const block = (const uint8_t *)row[j + i] + d / 32 * CACHE_BLOCK[CACHE];
                t[i] = f_cast(i_chunks<4 * WORDS>(block + 2 + (COLUMNS < 32 ? d % 32 : 0)));
                for (int b = 0; b < BLOCKS; b++) {
                    scales[b][i] = half_at(block + b * CACHE_BLOCK[CACHE]);
                }
            }
            f_transpose(t);
#pragma GCC unroll 16
            for (int w = 0; w < LANES; w++) {
                fetch.lines(1);
                const int b = w / WORDS;
                const I words = CACHE == Q8_CACHE ? i_cast(t[w]) : i_xor(i_cast(t[w]), i_bytes(0x88)); // less 8, signed
                widen_words<BITS, 0>(words, f_load(scales[b]), keys + (d + b * 32 + w % WORDS * 4) * KEYS + j);
            }
        }
    }
    return d;
}

// KEYS keys, which begin at row[0 .. KEYS), as floats, transposed.
template <CacheFormat CACHE> void transpose_keys(const char *const *row, int64_t head_dim, float *keys, Fetch &fetch) {
    int64_t done = 0;
    if constexpr (CACHE != F16_CACHE) {
        done = transpose_blocks<CACHE>(row, head_dim, keys, fetch);
    } else if constexpr (LANES > 4) { // in 128 bits words have as many shuffles, and go through memory: more instructions
        done = transpose_halves(row, head_dim, keys, fetch);
    }
    for (int j = 0; j < KEYS; j += LANES) {
        for (int64_t d = done; d < head_dim; d += LANES) {
            F t[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                t[i] = f_cached<CACHE>(row[j + i], d);
            }
            f_transpose(t);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                f_store(keys + (d + i) * KEYS + j, t[i]);
            }
            fetch.lines(3);
        }
    }
}

// VECTORS vectors of values of a place, from column d on: of the cache, or wide ones of DIMS columns.
template <CacheFormat CACHE> struct CachedValues {
    const char *const *rows;
    int64_t d;
    inline F at(int place, int v) const { return f_cached<CACHE>(rows[place], d + v * LANES); }
};
struct WideValues {
    const float *values;
    inline F at(int place, int v) const { return f_load(values + place * DIMS + v * LANES); }
};

// out[r] = out[r] * correction[r] + sum over places j of weights[r][j] * values[j], for VECTORS vectors of columns.
template <int ROWS, int VECTORS, class Values>
inline void accumulate(const CellBlock &block, const Values &values, int64_t value_dim, const float *weights,
                       const float *correction, float *out, Fetch &fetch) {
    F sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++) {
        const F c = f_set1(correction[r]);
        for (int v = 0; v < VECTORS; v++) {
            sum[r][v] = f_mul(c, f_load(out + r * value_dim + v * LANES));
        }
    }
    for (int j = block.first; j < block.last; j++) {
        if (j % 4 == 0) {
            fetch.lines((VECTORS * LANES + 15) / 12);
        }
        F value[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            value[v] = values.at(j, v);
        }
        for (int r = 0; r < ROWS; r++) {
            const F w = f_set1(weights[r * ATTN_BLOCK + j]);
            for (int v = 0; v < VECTORS; v++) {
                sum[r][v] = f_fma(w, value[v], sum[r][v]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) {
            f_store(out + r * value_dim + v * LANES, sum[r][v]);
        }
    }
}

// Of few rows, all columns.
template <int ROWS, CacheFormat CACHE>
void accumulate_cached(const BlockRows &rows, int64_t value_dim, const float *weights, const float *correction,
                       float *out, Fetch &fetch) {
    int64_t d = 0;
    for (; d + LONE_VECTORS * LANES <= value_dim; d += LONE_VECTORS * LANES) {
        accumulate<ROWS, LONE_VECTORS>(*rows.block, CachedValues<CACHE>{rows.values, d}, value_dim, weights, correction,
                                       out + d, fetch);
    }
    for (; d < value_dim; d += LANES) {
        accumulate<ROWS, 1>(*rows.block, CachedValues<CACHE>{rows.values, d}, value_dim, weights, correction, out + d,
                            fetch);
    }
}

// DIMS columns, or those that are left.
template <int ROWS>
void accumulate_wide(const CellBlock &block, const float *values, int vectors, int64_t value_dim, const float *weights,
                     const float *correction, float *out, Fetch &fetch) {
    if (vectors == DIM_VECTORS) {
        accumulate<ROWS, DIM_VECTORS>(block, WideValues{values}, value_dim, weights, correction, out, fetch);
        return;
    }
    for (int v = 0; v < vectors; v++) {
        accumulate<ROWS, 1>(block, WideValues{values + v * LANES}, value_dim, weights, correction, out + v * LANES,
                            fetch);
    }
}

// A row's scores of a block, scaled, capped and masked; returns the largest, at least `max`.
float finish_scores(const AttentionUnit &unit, const BlockRows &rows, int row, float *scores, float max) {
    const int64_t before = unit.start[row] - rows.begin, seen = unit.end[row] - rows.begin;
    const int from = before > 0 ? (int)before : 0, to = seen < ATTN_BLOCK ? (int)seen : ATTN_BLOCK;
    const uint16_t *const mask = unit.mask[row];
    F x[ATTN_BLOCK / LANES], largest = f_set1(max);
    for (int v = 0; v < ATTN_BLOCK / LANES; v++) {
        x[v] = f_mul(f_load(scores + v * LANES), f_set1(unit.scale));
    }
    if (unit.soft_cap > 0) {
        for (int v = 0; v < ATTN_BLOCK / LANES; v++) {
            x[v] = f_mul(f_set1(unit.soft_cap), f_tanh(f_div(x[v], f_set1(unit.soft_cap))));
        }
    }
    if (from > 0 || to < ATTN_BLOCK || mask) {
        uint16_t m[ATTN_BLOCK];
        for (int i = 0; i < ATTN_BLOCK; i++) {
            m[i] = i >= from && i < to ? 0 : 0xFC00; // minus infinity
        }
        for (int i = from; mask && i < to; i++) {
            m[i] = mask[rows.block->cells[i]];
        }
        for (int v = 0; v < ATTN_BLOCK / LANES; v++) {
            x[v] = f_add(x[v], f_half(m + v * LANES));
        }
    }
    for (int v = 0; v < ATTN_BLOCK / LANES; v++) {
        f_store(scores + v * LANES, x[v]);
        largest = f_max(largest, x[v]);
    }
    return f_reduce_max(largest);
}

// Scores become softmax weights, in place; correction[r] is the factor for what row r has so far. In three passes, in
// each of which no row waits for another.
void weigh(const AttentionUnit &unit, const BlockRows &rows, int first, int last, float *scores, float *correction,
           const AttentionState &state, Fetch &fetch) {
    for (int r = first; r < last; r++) {
        fetch.lines(LANES / 4);
        const float max = state.max[r];
        state.max[r] = finish_scores(unit, rows, r, scores + r * ATTN_BLOCK, max);
        correction[r] = max - state.max[r];
    }
    for (int r = first / LANES * LANES; r < last; r += LANES) {
        f_store(correction + r, f_exp(f_load(correction + r)));
    }
    for (int r = first; r < last; r++) {
        F total = f_zero();
        for (float *at = scores + r * ATTN_BLOCK; at < scores + (r + 1) * ATTN_BLOCK; at += 4 * LANES) {
            F w[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                w[v] = f_sub(f_load(at + v * LANES), f_set1(state.max[r]));
            }
            f_exp_below<4>(w);
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) {
                total = f_add(total, w[v]);
                f_store(at + v * LANES, w[v]);
            }
        }
        state.sum[r] = state.sum[r] * correction[r] + f_reduce_add(total);
    }
}

// Calls of(first, n) for tiles of at most ROW_TILE rows of [first, last), of about the same size.
template <class Of> void each_tile(int first, int last, const Of &of) {
    for (int n_tiles = (last - first + ROW_TILE - 1) / ROW_TILE; first < last; n_tiles--) {
        const int n = (last - first + n_tiles - 1) / n_tiles;
        of(first, n);
        first += n;
    }
}

typedef void Score(int64_t, const float *const *, const float *, float *, Fetch &);
typedef void Accumulate(const BlockRows &, int64_t, const float *, const float *, float *, Fetch &);
typedef void AccumulateWide(const CellBlock &, const float *, int, int64_t, const float *, const float *, float *,
                            Fetch &);

// The kernels of 1 to ROWS rows, by their number less one.
template <CacheFormat CACHE> struct RowKernels {
    Score *score[ROW_TILE];
    Accumulate *cached[LONE_ROWS];
    AccumulateWide *wide[ROW_TILE];

    constexpr RowKernels() : score(), cached(), wide() { fill<ROW_TILE>(); }
    template <int ROWS> constexpr void fill() {
        if constexpr (ROWS > 0) {
            score[ROWS - 1] = score_rows<ROWS>;
            wide[ROWS - 1] = accumulate_wide<ROWS>;
            if constexpr (ROWS <= LONE_ROWS) {
                cached[ROWS - 1] = accumulate_cached<ROWS, CACHE>;
            }
            fill<ROWS - 1>();
        }
    }
};

// Rows [first, last), all of which see the block.
template <CacheFormat CACHE>
void attend_block(const AttentionUnit &unit, const BlockRows &rows, int first, int last, float *memory,
                  const AttentionState &state, Fetch &fetch) {
    static constexpr RowKernels<CACHE> kernels;
    alignas(64) float scores[ATTN_ROWS * ATTN_BLOCK];
    alignas(64) float correction[ATTN_ROWS] = {};
    for (int key = 0; key < ATTN_BLOCK; key += KEYS) {
        transpose_keys<CACHE>(rows.keys + key, unit.head_dim, memory, fetch);
        each_tile(first, last, [&](int row, int n) {
            kernels.score[n - 1](unit.head_dim, unit.q + row, memory, scores + row * ATTN_BLOCK + key, fetch);
        });
    }
    weigh(unit, rows, first, last, scores, correction, state, fetch);
    const int64_t dim = unit.value_dim;
    if (last - first <= LONE_ROWS) {
        kernels.cached[last - first - 1](rows, dim, scores + first * ATTN_BLOCK, correction + first,
                                         state.out + first * dim, fetch);
        return;
    }
    for (int64_t d = 0; d < dim; d += DIMS) {
        const int vectors = (int)((dim - d < DIMS ? dim - d : DIMS) / LANES);
        for (int j = rows.block->first; j < rows.block->last; j++) {
            for (int v = 0; v < vectors; v++) {
                f_store(memory + j * DIMS + v * LANES, f_cached<CACHE>(rows.values[j], d + v * LANES));
            }
        }
        each_tile(first, last, [&](int row, int n) {
            kernels.wide[n - 1](*rows.block, memory, vectors, dim, scores + row * ATTN_BLOCK, correction + row,
                                state.out + row * dim + d, fetch);
        });
    }
}

// The block with place `begin` that a row sees, or nullptr.
inline const CellBlock *block_of(const AttentionUnit &unit, int row, int64_t begin) {
    const int64_t block = begin / ATTN_BLOCK, first = unit.start[row] / ATTN_BLOCK;
    return block >= first && begin < unit.end[row] ? unit.blocks + unit.block_ids[row][block - first] : nullptr;
}

// Neighbouring rows that see the same block.
struct Run {
    const CellBlock *block;
    int64_t begin;
    int first, last;
};

// The runs of a segment, block by block; returns how many.
int find_runs(const AttentionUnit &unit, int64_t begin, int64_t end, Run *runs) {
    int n = 0;
    for (; begin < end; begin += ATTN_BLOCK) {
        for (int first = 0, last; first < unit.rows; first = last) {
            const CellBlock *const block = block_of(unit, first, begin);
            for (last = first + 1; last < unit.rows && block_of(unit, last, begin) == block;) {
                last++;
            }
            if (block) {
                runs[n++] = {block, begin, first, last};
            }
        }
    }
    return n;
}

void attend(const AttentionUnit &unit, int64_t begin, int64_t end, const AttentionState &state,
            const BlockAhead &ahead) {
    constexpr int64_t MEMORY = MAX_HEAD_DIM * KEYS > ATTN_BLOCK * DIMS ? MAX_HEAD_DIM * KEYS : ATTN_BLOCK * DIMS;
    alignas(64) float memory[MEMORY];
    for (int r = 0; r < unit.rows; r++) {
        state.max[r] = -__builtin_inff();
        state.sum[r] = 0;
    }
    for (int64_t i = 0; i < unit.rows * unit.value_dim; i += LANES) {
        f_store(state.out + i, f_zero());
    }
    Run runs[ATTN_SEGMENT / ATTN_BLOCK * ATTN_ROWS];
    const int n_runs = find_runs(unit, begin, end, runs);
    const auto bytes = [&](int64_t n) { return (int)((n + 31) / 32 * CACHE_BLOCK[unit.cache]); };
    static constexpr decltype(&attend_block<F16_CACHE>) blocks[] = {attend_block<F16_CACHE>, attend_block<Q8_CACHE>,
                                                                    attend_block<Q4_CACHE>};
    for (int i = 0; i < n_runs; i++) {
        const Run &run = runs[i];
        BlockRows rows;
        rows.block = run.block;
        rows.begin = run.begin;
        find_rows(*run.block, unit.k, unit.k_stride, rows.keys);
        find_rows(*run.block, unit.v, unit.v_stride, rows.values);
        const BlockAhead next = i + 1 < n_runs ? BlockAhead{runs[i + 1].block, unit.k, unit.v} : ahead;
        Fetch fetch;
        if (next.block) {
            fetch.row = 0;
            fetch.bytes[0] = bytes(unit.head_dim);
            fetch.bytes[1] = bytes(unit.value_dim);
            find_rows(*next.block, next.k, unit.k_stride, fetch.rows);
            find_rows(*next.block, next.v, unit.v_stride, fetch.rows + ATTN_BLOCK);
        }
        blocks[unit.cache](unit, rows, run.first, run.last, memory, state, fetch);
    }
}

void merge(int64_t value_dim, int rows, const AttentionState &part, const AttentionState &total) {
    for (int r = 0; r < rows; r++) {
        if (part.sum[r] == 0) {
            continue;
        }
        const float max = part.max[r] > total.max[r] ? part.max[r] : total.max[r];
        const float a = exp1(total.max[r] - max), b = exp1(part.max[r] - max);
        total.max[r] = max;
        total.sum[r] = total.sum[r] * a + part.sum[r] * b;
        for (int64_t d = r * value_dim; d < (r + 1) * value_dim; d += LANES) {
            const F x = f_mul(f_load(total.out + d), f_set1(a));
            f_store(total.out + d, f_fma(f_load(part.out + d), f_set1(b), x));
        }
    }
}
