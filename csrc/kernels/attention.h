// Attention of a few query rows over the F16 cache: an online softmax in float32 (Milakov and Gimelshein,
// arXiv 1805.02867; Dao et al., arXiv 2205.14135). Scores have cached tokens in their lanes, outputs have
// head dimensions: no sum of a score or an output crosses lanes, and a row never meets another row.
#pragma once

// e^x; exactly 1 at 0, exactly 0 below -87 (also at -infinity). Cody-Waite reduction, Cephes' polynomial.
inline F f_exp(F x) {
    const F n = f_round(f_mul(x, f_set1(1.44269504f)));
    F r = f_fnma(n, f_set1(0.693359375f), x);
    r = f_fnma(n, f_set1(-2.12194440e-4f), r);
    F p = f_set1(1.9875691500e-4f);
    p = f_fma(p, r, f_set1(1.3981999507e-3f));
    p = f_fma(p, r, f_set1(8.3334519073e-3f));
    p = f_fma(p, r, f_set1(4.1665795894e-2f));
    p = f_fma(p, r, f_set1(1.6666665459e-1f));
    p = f_fma(p, r, f_set1(5.0000001201e-1f));
    p = f_fma(f_mul(r, r), p, f_add(r, f_set1(1)));
    return f_zero_unless_above(x, -87.0f, f_ldexp(p, n));
}
inline float exp1(float x) {
    float y[LANES];
    f_store(y, f_exp(f_set1(x)));
    return y[0];
}

constexpr int ROW_TILE = LANES == 16 ? 6 : 4;    // rows of a micro-kernel
constexpr int KEY_VECTORS = LANES == 8 ? 2 : 4;  // vectors of scores for each of its rows: AVX2 has 16 registers
constexpr int DIM_VECTORS = LANES == 8 ? 2 : 4;  // vectors of outputs

enum MaskKind { ALL_MASKED, NONE_MASKED, MIXED };

inline MaskKind mask_kind(const uint16_t *mask, int n) {
    int masked = 0, zero = 0;
    for (int j = 0; j < n; j++) {
        masked += mask[j] == 0xFC00; // minus infinity
        zero += mask[j] == 0;
    }
    return masked == n ? ALL_MASKED : zero == n ? NONE_MASKED : MIXED;
}

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

// out[r] = out[r] * correction[r] + sum over j of weights[r][j] * values[j], for VECTORS vectors of dimensions.
// Fetches the next block's keys meanwhile.
template <int ROWS, int VECTORS>
void accumulate(int n, int64_t head_dim, const float *weights, const float *correction, const char *values,
                int64_t stride, const char *next_keys, int64_t k_stride, float *out) {
    F sum[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++) {
        const F c = f_set1(correction[r]);
        for (int v = 0; v < VECTORS; v++) {
            sum[r][v] = f_mul(c, f_load(out + r * head_dim + v * LANES));
        }
    }
    for (int j = 0; j < n; j++, values += stride, next_keys += k_stride) {
        for (int byte = 0; byte < VECTORS * LANES * 2; byte += 64) {
            __builtin_prefetch(next_keys + byte);
        }
        F value[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            value[v] = f_half(values + v * LANES * 2);
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
            f_store(out + r * head_dim + v * LANES, sum[r][v]);
        }
    }
}

// The F16 keys [0, n) of a block as floats, transposed; the last one again after them. Fetches the values
// meanwhile: the stream of weights has pushed the cache of keys and values out of the processor's.
void transpose_keys(int64_t head_dim, const char *k, int64_t stride, int n, float *keys, const char *values,
                    int64_t v_stride) {
    for (int j = 0; j < ATTN_BLOCK; j += LANES) {
        const char *row[LANES];
        for (int i = 0; i < LANES; i++) {
            row[i] = k + (j + i < n ? j + i : n - 1) * stride;
        }
        for (int64_t d = 0; d < head_dim; d += LANES) {
            F t[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                t[i] = f_half(row[i] + 2 * d);
            }
            if (2 * d % 64 == 0) {
                for (int i = j; i < j + LANES && i < n; i++) {
                    __builtin_prefetch(values + i * v_stride + 2 * d);
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
float weigh(const uint16_t *mask, MaskKind kind, int n, float scale, float *scores, float &max, float &sum) {
    F x[ATTN_BLOCK / LANES], largest = f_set1(max);
    for (int v = 0; v < ATTN_BLOCK / LANES; v++) {
        x[v] = f_mul(f_load(scores + v * LANES), f_set1(scale));
        if (kind == MIXED || n < ATTN_BLOCK) {
            uint16_t m[LANES];
            for (int i = 0; i < LANES; i++) {
                m[i] = v * LANES + i < n ? mask[v * LANES + i] : 0xFC00;
            }
            x[v] = f_add(x[v], f_half(m));
        }
        largest = f_max(largest, x[v]);
    }
    const float before = max;
    max = f_reduce_max(largest);
    F total = f_zero();
    for (int v = 0; v < ATTN_BLOCK / LANES; v++) {
        const F w = f_exp(f_sub(x[v], f_set1(max)));
        total = f_add(total, w);
        f_store(scores + v * LANES, w);
    }
    const float correction = exp1(before - max);
    sum = sum * correction + f_reduce_add(total);
    return correction;
}

template <int ROWS>
void attend_rows(const AttentionUnit &unit, const float *keys, const char *values, int64_t j, int n, int first,
                 const MaskKind *kinds, const AttentionState &state) {
    alignas(64) float scores[ROWS * ATTN_BLOCK];
    for (int key = 0; key < ATTN_BLOCK; key += KEY_VECTORS * LANES) {
        score<ROWS>(unit.head_dim, unit.q + first, keys + key, scores + key);
    }
    float correction[ROWS];
    for (int r = 0; r < ROWS; r++) {
        const int row = first + r;
        if (kinds[row] == ALL_MASKED) {
            correction[r] = 1; // weights of zero change nothing
            for (int i = 0; i < ATTN_BLOCK; i += LANES) {
                f_store(scores + r * ATTN_BLOCK + i, f_zero());
            }
        } else {
            correction[r] = weigh(unit.mask[row] + j, kinds[row], n, unit.scale, scores + r * ATTN_BLOCK,
                                  state.max[row], state.sum[row]);
        }
    }
    float *out = state.out + first * unit.head_dim;
    const char *next_keys = unit.k + (j + ATTN_BLOCK) * unit.k_stride; // maybe past the last: only fetched
    int64_t d = 0;
    for (; d + DIM_VECTORS * LANES <= unit.head_dim; d += DIM_VECTORS * LANES) {
        accumulate<ROWS, DIM_VECTORS>(n, unit.head_dim, scores, correction, values + 2 * d, unit.v_stride,
                                      next_keys + 2 * d, unit.k_stride, out + d);
    }
    for (; d < unit.head_dim; d += LANES) {
        accumulate<ROWS, 1>(n, unit.head_dim, scores, correction, values + 2 * d, unit.v_stride, next_keys + 2 * d,
                            unit.k_stride, out + d);
    }
}

typedef void AttendRows(const AttentionUnit &, const float *, const char *, int64_t, int, int, const MaskKind *,
                        const AttentionState &);

// Cells [j, j + n), at most a block, for the rows that see any of them there.
void attend_block(const AttentionUnit &unit, int64_t j, int n, float *keys, const AttentionState &state) {
    static AttendRows *const tiles[6] = {attend_rows<1>, attend_rows<2>, attend_rows<3>,
                                         attend_rows<4>, attend_rows<5>, attend_rows<6>};
    MaskKind kinds[ATTN_ROWS];
    bool any = false;
    for (int r = 0; r < unit.rows; r++) { // heads of a token share its mask
        const bool same = r > 0 && unit.mask[r] == unit.mask[r - 1];
        const bool beyond = unit.gap[r] && j >= unit.gap[r]->first; // see attend_gathered
        kinds[r] = beyond ? ALL_MASKED : same ? kinds[r - 1] : mask_kind(unit.mask[r] + j, n);
        any |= kinds[r] != ALL_MASKED;
    }
    if (!any) {
        return;
    }
    transpose_keys(unit.head_dim, unit.k + j * unit.k_stride, unit.k_stride, n, keys, unit.v + j * unit.v_stride,
                   unit.v_stride);
    const int n_tiles = (unit.rows + ROW_TILE - 1) / ROW_TILE;
    for (int t = 0, first = 0; t < n_tiles; t++) { // of about the same size
        const int rows = (unit.rows - first + n_tiles - t - 1) / (n_tiles - t);
        bool wanted = false;
        for (int r = first; r < first + rows; r++) {
            wanted |= kinds[r] != ALL_MASKED;
        }
        if (wanted) {
            tiles[rows - 1](unit, keys, unit.v + j * unit.v_stride, j, n, first, kinds, state);
        }
        first += rows;
    }
}

// The block that rows with a gap see as [j, j + ATTN_BLOCK): its keys and values side by side, as without the gap.
void attend_gathered(const AttentionUnit &unit, int64_t j, float *keys, const AttentionState &state) {
    alignas(64) uint16_t k[MAX_HEAD_DIM * ATTN_BLOCK], v[MAX_HEAD_DIM * ATTN_BLOCK];
    uint16_t masks[ATTN_ROWS * ATTN_BLOCK];
    for (int first = 0, end; first < unit.rows; first = end) {
        const Gap *gap = unit.gap[first];
        for (end = first + 1; end < unit.rows && unit.gap[end] == gap;) {
            end++;
        }
        if (!gap || j < gap->first || j - gap->first >= gap->n) {
            continue;
        }
        const int32_t *cells = gap->cells + (j - gap->first);
        const int64_t left = gap->n - (j - gap->first), row_bytes = unit.head_dim * 2;
        const int n = left < ATTN_BLOCK ? (int)left : ATTN_BLOCK;
        for (int i = 0; i < n; i++) {
            __builtin_memcpy((char *)k + i * row_bytes, unit.k + cells[i] * unit.k_stride, (size_t)row_bytes);
            __builtin_memcpy((char *)v + i * row_bytes, unit.v + cells[i] * unit.v_stride, (size_t)row_bytes);
        }
        AttentionUnit part;
        part.head_dim = unit.head_dim;
        part.rows = end - first;
        part.k = (const char *)k;
        part.v = (const char *)v;
        part.k_stride = part.v_stride = row_bytes;
        part.scale = unit.scale;
        part.any_gap = false;
        for (int r = 0; r < part.rows; r++) {
            const uint16_t *mask = unit.mask[first + r];
            part.q[r] = unit.q[first + r];
            part.gap[r] = nullptr;
            if (r > 0 && mask == unit.mask[first + r - 1]) {
                part.mask[r] = part.mask[r - 1];
                continue;
            }
            part.mask[r] = masks + r * ATTN_BLOCK;
            for (int i = 0; i < n; i++) {
                masks[r * ATTN_BLOCK + i] = mask[cells[i]];
            }
        }
        attend_block(part, 0, n, keys, {state.max + first, state.sum + first, state.out + first * unit.head_dim});
    }
}

void attend(const AttentionUnit &unit, int64_t j0, int64_t j1, const AttentionState &state) {
    alignas(64) float keys[MAX_HEAD_DIM * ATTN_BLOCK];
    for (int r = 0; r < unit.rows; r++) {
        state.max[r] = -__builtin_inff();
        state.sum[r] = 0;
    }
    for (int64_t i = 0; i < unit.rows * unit.head_dim; i += LANES) {
        f_store(state.out + i, f_zero());
    }
    for (int64_t j = j0; j < j1; j += ATTN_BLOCK) {
        attend_block(unit, j, j1 - j < ATTN_BLOCK ? (int)(j1 - j) : ATTN_BLOCK, keys, state);
        if (unit.any_gap) {
            attend_gathered(unit, j, keys, state);
        }
    }
}

void merge(int64_t head_dim, int rows, const AttentionState &part, const AttentionState &total) {
    for (int r = 0; r < rows; r++) {
        if (part.sum[r] == 0) {
            continue;
        }
        const float max = part.max[r] > total.max[r] ? part.max[r] : total.max[r];
        const float a = exp1(total.max[r] - max), b = exp1(part.max[r] - max);
        total.max[r] = max;
        total.sum[r] = total.sum[r] * a + part.sum[r] * b;
        for (int64_t d = r * head_dim; d < (r + 1) * head_dim; d += LANES) {
            const F x = f_mul(f_load(total.out + d), f_set1(a));
            f_store(total.out + d, f_fma(f_load(part.out + d), f_set1(b), x));
        }
    }
}
