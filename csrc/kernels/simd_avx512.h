// Vectors of 16 lanes: AVX-512 with VNNI (Ice Lake, Zen 4 and newer).
#pragma once

constexpr int LANES = 16;
constexpr bool SIGNED_BYTES = false;
typedef __m512 F;
typedef __m512i I;

inline F f_zero() { return _mm512_setzero_ps(); }
inline F f_set1(float x) { return _mm512_set1_ps(x); }
inline F f_load(const float *p) { return _mm512_loadu_ps(p); }
inline void f_store(float *p, F x) { _mm512_storeu_ps(p, x); }
inline void f_store_n(float *p, F x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), x); }
inline F f_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
inline F f_abs(F a) { return _mm512_abs_ps(a); }
inline F f_sqrt(F a) { return _mm512_sqrt_ps(a); }
inline F f_round(F a) { return _mm512_roundscale_ps(a, 0); }
// a where x > limit, else 0.
inline F f_zero_unless_above(F x, float limit, F a) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ), a);
}
// a * 2^n for integral n.
inline F f_ldexp(F a, F n) { return _mm512_scalef_ps(a, n); }
inline float f_reduce_add(F a) { return _mm512_reduce_add_ps(a); }
inline float f_reduce_max(F a) { return _mm512_reduce_max_ps(a); }
inline F f_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
inline float half_at(const void *p) { return _cvtsh_ss(*(const unsigned short *)p); }
inline void f_store_half(void *p, F x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F f_i8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
// Numbers of 4 bits, less 8: bytes shifted to the right by 0 or 4.
inline F f_i4(const uint8_t *p, int shift) {
    const I bytes = _mm512_srl_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), _mm_cvtsi32_si128(shift));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(15)), _mm512_set1_epi32(8)));
}
// 2^-8 times numbers of 4 bits of exponent and 3 of mantissa (E4M3); the eighth bit is ignored.
inline F f_e4m3(const uint8_t *p) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(0x3F80)));
}
inline F f_cast(I x) { return _mm512_castsi512_ps(x); }
// 2^(e - 128) of bytes e.
inline F f_exponents(const uint8_t *p) {
    const I e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), one = _mm512_set1_epi32(1);
    const I small = _mm512_slli_epi32(_mm512_add_epi32(_mm512_min_epi32(e, one), one), 21); // e = 0 and 1: not normal
    return f_cast(_mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(e, one), 23), small));
}
inline I i_cast(F x) { return _mm512_castps_si512(x); }
inline F f_int(I x) { return _mm512_cvtepi32_ps(x); }

inline void i_forget(I &x) { __asm__("" : "+v"(x)); } // the compiler does not know what x is any more
inline I i_zero() { return _mm512_setzero_si512(); }
inline I i_load(const void *p) { return _mm512_loadu_si512(p); }
inline void i_store(void *p, I x) { _mm512_storeu_si512(p, x); }
inline I i_set1(int32_t x) { return _mm512_set1_epi32(x); }
inline I i_bytes(int x) { return _mm512_set1_epi8((char)x); }
inline I i_and(I a, I b) { return _mm512_and_si512(a, b); }
inline I i_xor(I a, I b) { return _mm512_xor_si512(a, b); }
// a | (b & c)
inline I i_or_and(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0xF8); }
inline I i_sub8(I a, I b) { return _mm512_sub_epi8(a, b); }
inline I i_sub16(I a, I b) { return _mm512_sub_epi16(a, b); }
inline I i_mul16(I a, I b) { return _mm512_mullo_epi16(a, b); }
template <int N> inline I i_shl16(I a) { return _mm512_slli_epi16(a, N); }
template <int N> inline I i_shr16(I a) { return _mm512_srli_epi16(a, N); }
// The high nibbles of all bytes.
inline I i_high4(I a) { return i_and(i_shr16<4>(a), i_bytes(15)); }
template <int N> inline I i_shl32(I a) { return _mm512_slli_epi32(a, N); }
template <int N> inline I i_sar32(I a) { return _mm512_srai_epi32(a, N); }
// 16 bytes each of the quantized blocks from p on, whose numbers take BYTES; a scale of two bytes lies between blocks.
template <int BYTES> constexpr int chunk_at(int c) { return 16 * c / BYTES * (BYTES + 2) + 16 * c % BYTES; }
template <int BYTES> inline I i_chunks(const uint8_t *p) {
    const auto chunk = [p](int c) { return _mm_loadu_si128((const __m128i *)(p + chunk_at<BYTES>(c))); };
    I x = _mm512_castsi128_si512(chunk(0));
    x = _mm512_inserti32x4(x, chunk(1), 1);
    x = _mm512_inserti32x4(x, chunk(2), 2);
    return _mm512_inserti32x4(x, chunk(3), 3);
}
inline I i_lookup(const int8_t *table, I index) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), index);
}
// The i-th of each 4 numbers of a, in all 4 places.
inline I i_spread(I a, int i) {
    switch (i) {
    case 0: return _mm512_shuffle_epi32(a, _MM_PERM_AAAA);
    case 1: return _mm512_shuffle_epi32(a, _MM_PERM_BBBB);
    case 2: return _mm512_shuffle_epi32(a, _MM_PERM_CCCC);
    default: return _mm512_shuffle_epi32(a, _MM_PERM_DDDD);
    }
}
// Weights are loaded as their value plus W::OFFSET. So sums start from minus OFFSET times the activations, which a record
// has as `start`.
template <int SHIFT> inline I i_start(I start) { return i_shl32<SHIFT>(start); }
inline I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I i_start_minus(I a, I b) { return _mm512_sub_epi32(a, b); }
// Sums of int8, and what sums of products start from: `factor` times minus that.
struct ByteSums {
    int32_t first, second;
    int32_t all() const { return first + second; }
    int32_t start(int factor) const { return -factor * all(); }
};
// sums[c] + products of 4 or 8 planes with the activations, 4 for each plane, at acts + 32 c. Plane by plane: a
// column's next product would wait for its last. A load for each product is as much as the processor can do: with
// SPREAD some columns take those of 4 planes with one and spread them by shuffles, which run beside the products.
template <class W, int PLANES, int NC>
__attribute__((always_inline)) inline void i_dot(I *sums, const I *w, const int8_t *acts) {
    constexpr int SHUFFLED = W::SPREAD ? NC * 3 / 8 : 0; // columns: measured
    I four[SHUFFLED + 1];
#pragma GCC unroll 8
    for (int i = 0; i < PLANES; i++) {
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            const int8_t *a = acts + 32 * c + 4 * i;
            if (c < SHUFFLED && i % 4 == 0) {
                four[c] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)a));
            }
            sums[c] = _mm512_dpbusd_epi32(sums[c], w[i], c < SHUFFLED ? i_spread(four[c], i % 4) : i_set1(int_at(a, 0)));
        }
    }
}
template <class W> constexpr int tokens_at_once() { return MAX_TILE; }

// ---- integer scales ----

// A byte for each lane, to be multiplied with what is summed in it.
inline I i_scales_u8(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline I i_scales_i8(const uint8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline I i_mul_add(I a, I b, I c) { return _mm512_add_epi32(c, _mm512_mullo_epi32(a, b)); }
// The same for a and b that fit in 16 bits, b not negative: one multiplication where Intel takes two and an addition.
constexpr bool WORD_PRODUCTS = true;
inline I i_mul_add_words(I a, I b, I c) { return _mm512_dpwssd_epi32(c, a, b); }
// Two bytes for each lane, LANES apart, to be multiplied with two 16-bit numbers and added.
template <bool SIGNED> inline I i_pairs(const uint8_t *p) {
    const __m128i a = _mm_loadu_si128((const __m128i *)p), b = _mm_loadu_si128((const __m128i *)(p + 16));
    const __m256i pairs = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
    return SIGNED ? _mm512_cvtepi8_epi16(pairs) : _mm512_cvtepu8_epi16(pairs);
}
// sum + products of each lane's pair with that of `acts`.
inline I i_dot_pairs(I sum, I pairs, int32_t acts) { return _mm512_dpwssd_epi32(sum, pairs, i_set1(acts)); }
// sum + products of 4 planes with one of activations, from registers.
inline I i_dot_registers(I sum, const I *w, I a) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        sum = _mm512_dpbusd_epi32(sum, w[i], a);
    }
    return sum;
}
// 16 floats, rounded to nearest, as int8; `sums` is added to.
inline void i_store_bytes(int8_t *p, F x, ByteSums &sums) {
    const __m128i q = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
    _mm_storeu_si128((__m128i *)p, q);
    // Sums of 8 unsigned bytes, each 128 too large.
    const __m128i s = _mm_sad_epu8(_mm_xor_si128(q, _mm_set1_epi8((char)0x80)), _mm_setzero_si128());
    sums.first += _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_unpackhi_epi64(s, s))) - 16 * 128;
}
// Words, double words or quad words of a and b in turns, in each 128 bits by themselves.
inline I i_low16(I a, I b) { return _mm512_unpacklo_epi16(a, b); }
inline I i_high16(I a, I b) { return _mm512_unpackhi_epi16(a, b); }
inline I i_low32(I a, I b) { return _mm512_unpacklo_epi32(a, b); }
inline I i_high32(I a, I b) { return _mm512_unpackhi_epi32(a, b); }
inline I i_low64(I a, I b) { return _mm512_unpacklo_epi64(a, b); }
inline I i_high64(I a, I b) { return _mm512_unpackhi_epi64(a, b); }
// Each 128 bits of x, `stride` words apart.
inline void i_scatter(uint16_t *p, int64_t stride, I x) {
    _mm_storeu_si128((__m128i *)p, _mm512_castsi512_si128(x));
    _mm_storeu_si128((__m128i *)(p + stride), _mm512_extracti32x4_epi32(x, 1));
    _mm_storeu_si128((__m128i *)(p + 2 * stride), _mm512_extracti32x4_epi32(x, 2));
    _mm_storeu_si128((__m128i *)(p + 3 * stride), _mm512_extracti32x4_epi32(x, 3));
}
// 16 rows of 16 floats become 16 columns.
inline void f_transpose(F *r) {
    F t[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const F a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
        const F c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm512_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
        t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const F a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
        const F c = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xDD), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xDD);
        r[i] = _mm512_shuffle_f32x4(a, b, 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(a, b, 0xDD);
        r[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(c, d, 0xDD);
    }
}
