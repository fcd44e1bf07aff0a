// Attention of a few query rows over a cache in F16 or Q8_0: an online softmax in float32 (Milakov and Gimelshein,
// arXiv 1805.02867; Dao et al., arXiv 2205.14135). Scores have cached tokens in their lanes, outputs have
// head dimensions: no sum of a score or an output crosses lanes, and a row never meets another row.
#pragma once

constexpr int ROW_TILE = LANES == 4 ? 4 : 6;     // rows of a micro-kernel
constexpr int KEY_VECTORS = LANES == 8 ? 2 : 4;  // vectors of scores for each of its rows: AVX2 has 16 registers
constexpr int DIM_VECTORS = LANES == 8 ? 2 : 4;  // vectors of outputs

// scores[r][0 .. KEY_VECTORS * LANES) = q[r] . keys; keys[d][ATTN_BLOCK] transposed.
template <int ROWS>
void score(int64_t head_dim, const float *const *q, const float *keys, float *scores) {
    F sum[ROWS][KEY_VECTORS];
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < KEY_VECTORS; v++) {
            sum[r][v] = f_zero();
        }
    }
    for (int64_t d = 0; d < head_dim; d++, keys += ATTN_BLOCK) {
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
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < KEY_VECTORS; v++) {
            f_store(scores + r * ATTN_BLOCK + v * LANES, sum[r][v]);
        }
    }
}

// LANES numbers of a row of the cache from column d, a multiple of LANES, on.
template <bool Q8> inline F f_cached(const char *row, int64_t d) {
    if (!Q8) {
        return f_half(row + 2 * d);
    }
    const uint8_t *const block = (const uint8_t *)row + d / 32 * Q8_BLOCK;
    return f_mul(f_i8(block + 2 + d % 32), f_set1(half_at(block)));
}
// Where they begin, in bytes: to be fetched.
template <bool Q8> constexpr int64_t cached_offset(int64_t d) { return Q8 ? d / 32 * Q8_BLOCK + d % 32 : 2 * d; }

// A block of places: where its keys, values and the keys of the next one lie, and which of the places are seen.
struct BlockRows {
    const char *keys[ATTN_BLOCK], *values[ATTN_BLOCK], *next_keys[ATTN_BLOCK];
    int64_t k_stride, v_stride;
    const CellBlock *block;
    int64_t begin;    // the first place
    bool is_straight; // the cells of this block follow each other, and those of the next: strides lead to them
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

// out[r] = out[r] * correction[r] + sum over j of weights[r][j] * values[j], for VECTORS vectors of dimensions from
// `d` on. Fetches the next block's keys meanwhile. Not inlined: inside of its caller the values would go to memory.
template <int ROWS, int VECTORS, bool STRAIGHT, bool Q8>
__attribute__((noinline)) void
accumulate(const BlockRows &rows, int64_t value_dim, int64_t d, const float *weights, const float *correction,
                float *out) {
    F sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++) {
        const F c = f_set1(correction[r]);
        for (int v = 0; v < VECTORS; v++) {
            sum[r][v] = f_mul(c, f_load(out + r * value_dim + d + v * LANES));
        }
    }
    int64_t j = rows.block->first; // there is at least one
    const int64_t last = rows.block->last;
    const char *values = rows.values[j], *next_keys = rows.next_keys[j] + cached_offset<Q8>(d);
    do {
        if (!STRAIGHT) {
            values = rows.values[j];
            next_keys = rows.next_keys[j] + cached_offset<Q8>(d);
        }
        for (int byte = 0; byte < VECTORS * LANES * (Q8 ? 1 : 2); byte += 64) {
            __builtin_prefetch(next_keys + byte);
        }
        F value[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            value[v] = f_cached<Q8>(values, d + v * LANES);
        }
        for (int r = 0; r < ROWS; r++) {
            const F w = f_set1(weights[r * ATTN_BLOCK + j]);
            for (int v = 0; v < VECTORS; v++) {
                sum[r][v] = f_fma(w, value[v], sum[r][v]);
            }
        }
        values += rows.v_stride;
        next_keys += rows.k_stride;
    } while (++j < last);
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < VECTORS; v++) {
            f_store(out + r * value_dim + d + v * LANES, sum[r][v]);
        }
    }
}

// The keys of a block as floats, transposed. Fetches the values meanwhile: the stream of weights has pushed the
// cache of keys and values out of the processor's.
template <bool Q8> void transpose_keys(const BlockRows &rows, int64_t head_dim, float *keys) {
    const int last = rows.block->last;
    for (int j = 0; j < ATTN_BLOCK; j += LANES) {
        const char *row[LANES];
        for (int i = 0; i < LANES; i++) {
            row[i] = rows.keys[j + i];
        }
        for (int64_t d = 0; d < head_dim; d += LANES) {
            F t[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                t[i] = f_cached<Q8>(row[i], d);
            }
            if (d % (Q8 ? 64 : 32) == 0) {
                for (int i = j; i < j + LANES && i < last; i++) {
                    __builtin_prefetch(rows.values[i] + cached_offset<Q8>(d));
                }
            }
            f_transpose(t);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                f_store(keys + (d + i) * ATTN_BLOCK + j, t[i]);
            }
        }
    }
}

// Softmax weights of a row's scores of a block, in place; returns the factor for what the row has so far.
float weigh(const AttentionUnit &unit, const BlockRows &rows, int row, float *scores, float &max, float &sum) {
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
        largest = f_max(largest, x[v]);
    }
    const float max_before = max;
    max = f_reduce_max(largest);
    F total = f_zero();
    for (int v = 0; v < ATTN_BLOCK / LANES; v++) {
        const F w = f_exp(f_sub(x[v], f_set1(max)));
        total = f_add(total, w);
        f_store(scores + v * LANES, w);
    }
    const float correction = exp1(max_before - max);
    sum = sum * correction + f_reduce_add(total);
    return correction;
}

// Rows from `first` on.
template <int ROWS, bool Q8>
void attend_rows(const AttentionUnit &unit, const BlockRows &rows, const float *keys, int first,
                 const AttentionState &state) {
    alignas(64) float scores[ROWS * ATTN_BLOCK];
    for (int key = 0; key < ATTN_BLOCK; key += KEY_VECTORS * LANES) {
        score<ROWS>(unit.head_dim, unit.q + first, keys + key, scores + key);
    }
    float correction[ROWS];
    for (int r = 0; r < ROWS; r++) {
        correction[r] =
            weigh(unit, rows, first + r, scores + r * ATTN_BLOCK, state.max[first + r], state.sum[first + r]);
    }
    float *out = state.out + first * unit.value_dim;
    const auto wide =
        rows.is_straight ? accumulate<ROWS, DIM_VECTORS, true, Q8> : accumulate<ROWS, DIM_VECTORS, false, Q8>;
    int64_t d = 0;
    for (; d + DIM_VECTORS * LANES <= unit.value_dim; d += DIM_VECTORS * LANES) {
        wide(rows, unit.value_dim, d, scores, correction, out);
    }
    for (; d < unit.value_dim; d += LANES) {
        accumulate<ROWS, 1, false, Q8>(rows, unit.value_dim, d, scores, correction, out);
    }
}

typedef void AttendRows(const AttentionUnit &, const BlockRows &, const float *, int, const AttentionState &);

// Rows [first, last), all of which see the block.
template <bool Q8>
void attend_block(const AttentionUnit &unit, const BlockRows &rows, int first, int last, float *keys,
                  const AttentionState &state) {
    static AttendRows *const tiles[6] = {attend_rows<1, Q8>, attend_rows<2, Q8>, attend_rows<3, Q8>,
                                         attend_rows<4, Q8>, attend_rows<5, Q8>, attend_rows<6, Q8>};
    transpose_keys<Q8>(rows, unit.head_dim, keys);
    for (int n_tiles = (last - first + ROW_TILE - 1) / ROW_TILE; first < last; n_tiles--) { // of about the same size
        const int n = (last - first + n_tiles - 1) / n_tiles;
        tiles[n - 1](unit, rows, keys, first, state);
        first += n;
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

void attend(const AttentionUnit &unit, int64_t begin, int64_t end, const AttentionState &state) {
    alignas(64) float keys[MAX_HEAD_DIM * ATTN_BLOCK];
    for (int r = 0; r < unit.rows; r++) {
        state.max[r] = -__builtin_inff();
        state.sum[r] = 0;
    }
    for (int64_t i = 0; i < unit.rows * unit.value_dim; i += LANES) {
        f_store(state.out + i, f_zero());
    }
    Run runs[ATTN_SEGMENT / ATTN_BLOCK * ATTN_ROWS];
    const int n_runs = find_runs(unit, begin, end, runs);
    BlockRows rows;
    rows.k_stride = unit.k_stride;
    rows.v_stride = unit.v_stride;
    for (int i = 0; i < n_runs; i++) {
        const Run &run = runs[i];
        const CellBlock *next = i + 1 < n_runs ? runs[i + 1].block : block_of(unit, run.first, end);
        next = next ? next : run.block;
        rows.block = run.block;
        rows.is_straight = run.block->are_neighbours && next->are_neighbours;
        rows.begin = run.begin;
        find_rows(*run.block, unit.k, unit.k_stride, rows.keys);
        find_rows(*run.block, unit.v, unit.v_stride, rows.values);
        find_rows(*next, unit.k, unit.k_stride, rows.next_keys);
        (unit.is_q8 ? attend_block<true> : attend_block<false>)(unit, rows, run.first, run.last, keys, state);
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
