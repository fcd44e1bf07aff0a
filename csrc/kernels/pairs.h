// How the sums of a tile lie in vectors: each token's rows in one, or pairs of tokens by pairs of rows.
//
// An instruction that multiplies 2 rows by 8 columns by 2 tokens (smmla) leaves four sums: of two tokens t and u
//
//     sum[t] = a:t a:u b:t b:u     sum[u] = c:t c:u d:t d:u     for the rows a, b, c, d of a group
//
// They stay so until a product is done: what belongs to a row, its scale, is brought to the rows of each vector, and
// what belongs to a token to its two tokens. The last of an odd number of tokens is alone, its rows in one vector.
#pragma once

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool PAIRED = true;
#else
constexpr bool PAIRED = false;
#endif

constexpr bool is_paired(int nc, int c) { return PAIRED && c < nc / 2 * 2; }

// Where columns j, j + 1, ... of token c, until the next multiple of 8, lie in a record of nc tokens. Of a pair: 8
// columns of one, the same of the other; columns 0, 16, 8, 24, so that each half has its columns at + 0 and + 32. Of a wide tile: from
// wide_bytes on.
inline int act_place(int nc, int c, int j) {
    return nc > MAX_TILE ? 64 * c + j : is_paired(nc, c) ? c / 2 * 64 + j / 8 % 2 * 32 + j / 16 * 16 + c % 2 * 8 + j % 8 : 32 * c + j;
}

#ifdef __ARM_FEATURE_MATMUL_INT8
// One of nc numbers, that of token c, where token c's sums are.
template <int NC> inline I i_of_token(const int8_t *numbers, int c) {
    if (!is_paired(NC, c)) {
        return vdupq_n_s32(int_at(numbers, c));
    }
    int64_t both;
    __builtin_memcpy(&both, numbers + c / 2 * 8, 8);
    return vreinterpretq_s32_s64(vdupq_n_s64(both));
}
template <int NC> inline F f_of_token(const int8_t *numbers, int c) { return f_cast(i_of_token<NC>(numbers, c)); }
// A number of each row, where token c's sums are.
template <int NC> inline F f_of_rows(F rows, int c) {
    return !is_paired(NC, c) ? rows : c % 2 ? vzip2q_f32(rows, rows) : vzip1q_f32(rows, rows);
}
template <int NC> inline I i_of_rows(I rows, int c) {
    return !is_paired(NC, c) ? rows : c % 2 ? vzip2q_s32(rows, rows) : vzip1q_s32(rows, rows);
}
// As i_dot_pairs, where token c's sums are.
template <int NC> inline I i_dot_pairs_of(I sum, I pairs, const int8_t *numbers, int c) {
    if (!is_paired(NC, c)) {
        return i_dot_pairs(sum, pairs, int_at(numbers, c));
    }
    const int16x8_t rows = vreinterpretq_s16_s32(pairs), tokens = vreinterpretq_s16_s32(i_of_token<NC>(numbers, c));
    const int16x4_t first = vget_low_s16(rows), second = vget_high_s16(rows);
    const int16x4_t a = c % 2 ? vzip2_s16(first, first) : vzip1_s16(first, first);
    const int16x4_t b = c % 2 ? vzip2_s16(second, second) : vzip1_s16(second, second);
    return vmlal_s16(vmlal_s16(sum, a, vget_low_s16(vuzp1q_s16(tokens, tokens))), b,
                     vget_low_s16(vuzp2q_s16(tokens, tokens)));
}
// Each token's rows in one vector.
template <int NC> inline void f_unpair(F *sums) {
#pragma GCC unroll 4
    for (int c = 0; c + 1 < NC; c += 2) {
        const F ab = sums[c], cd = sums[c + 1];
        sums[c] = vuzp1q_f32(ab, cd);
        sums[c + 1] = vuzp2q_f32(ab, cd);
    }
}
// sums + products of 4 or 8 planes with the activations, see simd_neon.h; of a token that is alone, all rows of a sum
// are the same number before.
template <class W, int PLANES, int NC>
__attribute__((always_inline)) inline void i_dot(I *sums, const I *w, const int8_t *acts) {
#pragma GCC unroll 4
    for (int c = 0; c + 1 < NC; c += 2) {
#pragma GCC unroll 4
        for (int g = 0; g < PLANES / 2; g++) {
            const int8x16_t a = vld1q_s8(acts + 32 * c + g % 2 * 32 + g / 2 * 16);
            sums[c] = vmmlaq_s32(sums[c], bytes_of(w[2 * g]), a);
            sums[c + 1] = vmmlaq_s32(sums[c + 1], bytes_of(w[2 * g + 1]), a);
        }
    }
    if (NC % 2) { // beside a token of zeros
        constexpr int c = NC - 1;
        I ab = sums[c], cd = sums[c];
#pragma GCC unroll 4
        for (int g = 0; g < PLANES / 2; g++) {
            const int8x16_t a = vcombine_s8(vld1_s8(acts + 32 * c + 8 * g), vdup_n_s8(0));
            ab = vmmlaq_s32(ab, bytes_of(w[2 * g]), a);
            cd = vmmlaq_s32(cd, bytes_of(w[2 * g + 1]), a);
        }
        sums[c] = vuzp1q_s32(ab, cd);
    }
}
#else
template <int NC> inline I i_of_token(const int8_t *numbers, int c) { return i_set1(int_at(numbers, c)); }
template <int NC> inline F f_of_token(const int8_t *numbers, int c) { return f_set1(float_at(numbers, c)); }
template <int NC> inline F f_of_rows(F rows, int) { return rows; }
template <int NC> inline I i_of_rows(I rows, int) { return rows; }
template <int NC> inline I i_dot_pairs_of(I sum, I pairs, const int8_t *numbers, int c) {
    return i_dot_pairs(sum, pairs, int_at(numbers, c));
}
template <int NC> inline void f_unpair(F *) {}
#endif
