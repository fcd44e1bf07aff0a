// Vectors of 8 lanes: AVX2 with FMA and F16C, and AVX-VNNI where the compiler is told of it.
#pragma once

constexpr int LANES = 8;
#ifdef __AVXVNNI__
constexpr bool SIGNED_BYTES = false;
#else
constexpr bool SIGNED_BYTES = true; // unsigned bytes above 127 would overflow the 16-bit sums of maddubs
#endif
typedef __m256 F;
typedef __m256i I;

inline F f_zero() { return _mm256_setzero_ps(); }
inline F f_set1(float x) { return _mm256_set1_ps(x); }
inline F f_load(const float *p) { return _mm256_loadu_ps(p); }
inline void f_store(float *p, F x) { _mm256_storeu_ps(p, x); }
inline I lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline void f_store_n(float *p, F x, int n) { _mm256_maskstore_ps(p, lanes_below(n), x); }
inline F f_load_n(const float *p, int n) { return _mm256_maskload_ps(p, lanes_below(n)); }
inline F f_add(F a, F b) { return _mm256_add_ps(a, b); }
inline F f_sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F f_mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm256_div_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F f_fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
inline F f_max(F a, F b) { return _mm256_max_ps(a, b); }
inline F f_min(F a, F b) { return _mm256_min_ps(a, b); }
inline F f_abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F f_sqrt(F a) { return _mm256_sqrt_ps(a); }
inline F f_round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a where x > limit, else 0.
inline F f_zero_unless_above(F x, float limit, F a) {
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GT_OQ), a);
}
// a * 2^n for integral n in [-252, 254], in two steps: the exponent of one factor ends at 127.
inline F f_ldexp(F a, F n) {
    const I e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1), rest = _mm256_sub_epi32(e, half);
    const I bias = _mm256_set1_epi32(127);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline float f_reduce_add(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float f_reduce_max(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline F f_half(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
inline float half_at(const void *p) { return _cvtsh_ss(*(const unsigned short *)p); }
inline void f_store_half(void *p, F x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F f_i8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
// Numbers of 4 bits, less 8: bytes shifted to the right by 0 or 4.
inline F f_i4(const uint8_t *p, int shift) {
    const I bytes = _mm256_srl_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), _mm_cvtsi32_si128(shift));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(bytes, _mm256_set1_epi32(15)), _mm256_set1_epi32(8)));
}
// 2^-8 times numbers of 4 bits of exponent and 3 of mantissa (E4M3); the eighth bit is ignored.
inline F f_e4m3(const uint8_t *p) {
    const __m128i words = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(0x3F80)));
}
inline F f_cast(I x) { return _mm256_castsi256_ps(x); }
// 2^(e - 128) of bytes e.
inline F f_exponents(const uint8_t *p) {
    const I e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), one = _mm256_set1_epi32(1);
    const I small = _mm256_slli_epi32(_mm256_add_epi32(_mm256_min_epi32(e, one), one), 21); // e = 0 and 1: not normal
    return f_cast(_mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(e, one), 23), small));
}
inline F f_int(I x) { return _mm256_cvtepi32_ps(x); }

inline void i_forget(I &x) { __asm__("" : "+x"(x)); } // the compiler does not know what x is any more
inline void i_put_down(I &x) { __asm__("" : "+m"(x)); } // x is in memory, not in a register
inline I i_zero() { return _mm256_setzero_si256(); }
inline I i_cast(F x) { return _mm256_castps_si256(x); }
inline I i_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline void i_store(void *p, I x) { _mm256_storeu_si256((__m256i *)p, x); }
inline I i_set1(int32_t x) { return _mm256_set1_epi32(x); }
inline I i_bytes(int x) { return _mm256_set1_epi8((char)x); }
inline I i_and(I a, I b) { return _mm256_and_si256(a, b); }
inline I i_xor(I a, I b) { return _mm256_xor_si256(a, b); }
// a | (b & c)
inline I i_or_and(I a, I b, I c) { return _mm256_or_si256(a, _mm256_and_si256(b, c)); }
inline I i_sub8(I a, I b) { return _mm256_sub_epi8(a, b); }
inline I i_sub16(I a, I b) { return _mm256_sub_epi16(a, b); }
inline I i_mul16(I a, I b) { return _mm256_mullo_epi16(a, b); }
template <int N> inline I i_shl16(I a) { return _mm256_slli_epi16(a, N); }
template <int N> inline I i_shr16(I a) { return _mm256_srli_epi16(a, N); }
// The high nibbles of all bytes.
inline I i_high4(I a) { return i_and(i_shr16<4>(a), i_bytes(15)); }
inline I i_add(I a, I b) { return _mm256_add_epi32(a, b); }
template <int N> inline I i_shl32(I a) { return _mm256_slli_epi32(a, N); }
template <int N> inline I i_sar32(I a) { return _mm256_srai_epi32(a, N); }
// 16 bytes each of the quantized blocks from p on, whose numbers take BYTES; a scale of two bytes lies between blocks.
template <int BYTES> constexpr int chunk_at(int c) { return 16 * c / BYTES * (BYTES + 2) + 16 * c % BYTES; }
template <int BYTES> inline I i_chunks(const uint8_t *p) {
    const auto chunk = [p](int c) { return _mm_loadu_si128((const __m128i *)(p + chunk_at<BYTES>(c))); };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(chunk(0)), chunk(1), 1);
}
inline I i_lookup(const int8_t *table, I index) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), index);
}
// The i-th of each 4 numbers of a, in all 4 places.
inline I i_spread(I a, int i) {
    switch (i) {
    case 0: return _mm256_shuffle_epi32(a, 0x00);
    case 1: return _mm256_shuffle_epi32(a, 0x55);
    case 2: return _mm256_shuffle_epi32(a, 0xAA);
    default: return _mm256_shuffle_epi32(a, 0xFF);
    }
}
// How many tokens go through the products together: their sums, the weights and what is between them have 16 registers.
template <class W> constexpr int tokens_at_once() {
#ifdef __AVXVNNI__
    return W::HALVES ? 2 : MAX_TILE;
#else
    return 1;
#endif
}

// ---- products ----

// Weights are loaded as their value plus W::OFFSET. So sums start from minus OFFSET times the activations, which a record
// has as `start`. i_dot: sums[c] of products of 4 or 8 planes with the activations, 4 for each plane, at acts + 32 c.
#ifdef __AVXVNNI__
template <int SHIFT> inline I i_start(I start) { return i_shl32<SHIFT>(start); }
inline I i_start_minus(I a, I b) { return _mm256_sub_epi32(a, b); }
template <class W, int PLANES, int NC>
__attribute__((always_inline)) inline void i_dot(I *sums, const I *w, const int8_t *acts) {
    // A load for each product is as much as the processor can do: some tokens take the activations of 4 planes with one
    // and spread them by shuffles (measured; where weights are looked up, shuffles have no time).
    constexpr int SHUFFLED = W::IQ4 || W::FP4           ? 0
                             : W::STEP == 32 * LANES ? (NC < 4 ? 1 : NC * 3 / 8)
                             : W::HALVES             ? NC / 2
                                                     : NC / 4;
    I four[SHUFFLED + 1];
#pragma GCC unroll 8
    for (int i = 0; i < PLANES; i++) {
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) { // plane by plane: a column's next product would wait for its last
            const int8_t *a = acts + 32 * c + 4 * i;
            if (c < SHUFFLED && i % 4 == 0) {
                four[c] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)a));
            }
            sums[c] = _mm256_dpbusd_avx_epi32(sums[c], w[i], c < SHUFFLED ? i_spread(four[c], i % 4) : i_set1(int_at(a, 0)));
        }
    }
}
#else
// Sums of columns 0, 1 of each 4 and of columns 2, 3 are 16 bits each. They may overflow on the way: what counts is that
// the whole fits.
template <int SHIFT> inline I i_start(I start) { return i_shl16<SHIFT>(start); }
inline I i_start_minus(I a, I b) { return _mm256_sub_epi16(a, b); }
// How many planes' products 16 bits hold.
template <class W> constexpr int planes16() {
    constexpr int LARGEST = W::STARTS ? W::OFFSET : W::LARGEST; // of the value itself
    return LARGEST <= 16 ? 8 : LARGEST <= 32 ? 4 : 1;
}
template <class W> inline I i_products16(I w, const int8_t *acts) {
    const I a = _mm256_set1_epi32(int_at(acts, 0));
    return W::LARGEST >= 128 ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w)) : _mm256_maddubs_epi16(w, a);
}
// Two by two: a chain of additions would be waited for.
template <class W, int PLANES> __attribute__((always_inline)) inline I i_sum16(const I *w, const int8_t *acts) {
    if constexpr (PLANES == 1) {
        return i_products16<W>(w[0], acts);
    } else {
        I sum = i_sum16<W, PLANES / 2>(w, acts);
        sum = _mm256_add_epi16(sum, i_sum16<W, PLANES / 2>(w + PLANES / 2, acts + 2 * PLANES));
        i_forget(sum); // else the compiler would sum in an order that takes more registers
        return sum;
    }
}
template <class W, int PLANES> __attribute__((always_inline)) inline I i_dot16(I start, const I *w, const int8_t *acts) {
    const I sum = i_sum16<W, PLANES>(w, acts);
    return W::STARTS ? _mm256_add_epi16(start, sum) : sum;
}
template <class W, int PLANES, int NC>
__attribute__((always_inline)) inline void i_dot(I *sums, const I *w, const int8_t *acts) {
    constexpr int AT_ONCE = PLANES < planes16<W>() ? PLANES : planes16<W>();
    static_assert(!W::STARTS || AT_ONCE == PLANES, "there is one start");
#pragma GCC unroll 8
    for (int i = 0; i < PLANES; i += AT_ONCE) {
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            const I products = i_dot16<W, AT_ONCE>(sums[c], w + i, acts + 32 * c + 4 * i);
            const I dot = _mm256_madd_epi16(products, _mm256_set1_epi16(1));
            sums[c] = i ? _mm256_add_epi32(sums[c], dot) : dot;
        }
    }
}
#endif

// ---- integer scales ----

// A byte for each lane, to be multiplied with what is summed in it: as int32, or where 16-bit sums of two neighbouring
// columns are multiplied and added at once, as both halves.
#ifdef __AVXVNNI__
inline I i_scales_u8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
inline I i_scales_i8(const uint8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
#else
inline I i_scales_u8(const uint8_t *p) {
    int64_t all;
    __builtin_memcpy(&all, p, sizeof all);
    return _mm256_shuffle_epi8(_mm256_set1_epi64x(all),
                               _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5,
                                                -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1));
}
inline I i_scales_i8(const uint8_t *p) {
    const __m128i twice = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
    return _mm256_shuffle_epi8(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                               _mm256_broadcastsi128_si256(twice));
}
#endif
#ifdef __AVXVNNI__
inline I i_mul_add(I a, I b, I c) { return _mm256_add_epi32(c, _mm256_mullo_epi32(a, b)); }
// The same for a and b that fit in 16 bits, b not negative: one multiplication where Intel takes two and an addition.
constexpr bool WORD_PRODUCTS = true;
inline I i_mul_add_words(I a, I b, I c) { return _mm256_dpwssd_avx_epi32(c, a, b); }
#else
#define ES_WORD_SUMS
template <class W, int NC, int N>
__attribute__((always_inline)) inline void i_dot_scaled(I *sums, const I *w, const int8_t *acts, const int8_t *const *starts,
                                                        const I *scales, int first) {
    constexpr int PLANES = W::HALVES ? 4 : 8, AT_ONCE = PLANES < planes16<W>() ? PLANES : planes16<W>();
    static_assert(!W::STARTS || AT_ONCE == PLANES, "there is one start");
#pragma GCC unroll 8
    for (int c = 0; c < N; c++) {
        I all;
#pragma GCC unroll 8
        for (int i = 0; i < 8; i += AT_ONCE) {
            const int half = i / PLANES;
            const I start = W::STARTS ? i_start<W::SHIFT>(i_set1(int_at(starts[half], first + c))) : i_zero();
            const I products = i_dot16<W, AT_ONCE>(start, w + i, acts + 32 * c + 4 * i);
            const I dot = _mm256_madd_epi16(products, scales[half]);
            all = i ? _mm256_add_epi32(all, dot) : dot;
            i_forget(all);
        }
        sums[c] = _mm256_add_epi32(sums[c], all);
        if (NC > 4) {
            i_put_down(sums[c]); // else the compiler would keep some and store others twice
        }
    }
}
#endif
// Two bytes for each lane, LANES apart, to be multiplied with two 16-bit numbers and added.
template <bool SIGNED> inline I i_pairs(const uint8_t *p) {
    const __m128i both = _mm_loadu_si128((const __m128i *)p), pairs = _mm_unpacklo_epi8(both, _mm_srli_si128(both, 8));
    return SIGNED ? _mm256_cvtepi8_epi16(pairs) : _mm256_cvtepu8_epi16(pairs);
}
// sum + products of each lane's pair with that of `acts`.
inline I i_dot_pairs(I sum, I pairs, int32_t acts) {
#ifdef __AVXVNNI__
    return _mm256_dpwssd_avx_epi32(sum, pairs, i_set1(acts));
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, i_set1(acts)));
#endif
}
// sum + products of 4 planes, none above 31, with one of activations, from registers.
inline I i_dot_registers(I sum, const I *w, I a) {
#ifdef __AVXVNNI__
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        sum = _mm256_dpbusd_avx_epi32(sum, w[i], a);
    }
    return sum;
#else
    const I first = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], a), _mm256_maddubs_epi16(w[1], a));
    const I second = _mm256_add_epi16(_mm256_maddubs_epi16(w[2], a), _mm256_maddubs_epi16(w[3], a));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1)));
#endif
}
// Sums of int8 in columns 0, 1 of each 4 and in columns 2, 3; and what sums of products start from: `factor` times minus
// that.
struct ByteSums {
    int32_t first, second;
    int32_t all() const { return first + second; }
    int32_t start(int factor) const {
#ifdef ES_WORD_SUMS
        return (int32_t)((uint32_t)(-factor * first & 0xFFFF) | (uint32_t)(-factor * second) << 16);
#else
        return -factor * all();
#endif
    }
};
// 8 floats, rounded to nearest, as int8; `sums` is added to.
inline void i_store_bytes(int8_t *p, F x, ByteSums &sums) {
    const I q = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
    __m128i s = _mm_madd_epi16(words, _mm_set1_epi16(1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    const int64_t both = _mm_cvtsi128_si64(s);
    sums.first += (int32_t)both;
    sums.second += (int32_t)(both >> 32);
}
// Words, double words or quad words of a and b in turns, in each 128 bits by themselves.
inline I i_low16(I a, I b) { return _mm256_unpacklo_epi16(a, b); }
inline I i_high16(I a, I b) { return _mm256_unpackhi_epi16(a, b); }
inline I i_low32(I a, I b) { return _mm256_unpacklo_epi32(a, b); }
inline I i_high32(I a, I b) { return _mm256_unpackhi_epi32(a, b); }
inline I i_low64(I a, I b) { return _mm256_unpacklo_epi64(a, b); }
inline I i_high64(I a, I b) { return _mm256_unpackhi_epi64(a, b); }
// Each 128 bits of x, `stride` words apart.
inline void i_scatter(uint16_t *p, int64_t stride, I x) {
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(x));
    _mm_storeu_si128((__m128i *)(p + stride), _mm256_extracti128_si256(x, 1));
}
// 8 rows of 8 floats become 8 columns.
inline void f_transpose(F *r) {
    F t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 4) {
        const F a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
        const F c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm256_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
        t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}
