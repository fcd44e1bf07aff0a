// Vectors of 4 lanes: 64-bit ARM, with dot products (sdot) or products of matrices (smmla) where the compiler is told
// of them.
//
// Groups of 4 rows and not of 8: totals, sums and weights of eight tokens then stay in the 32 registers. With 8
// rows activations are loaded half as often, but a quarter of the loop's instructions went to the stack.
#pragma once

constexpr int LANES = 4;
constexpr bool SIGNED_BYTES = true;
typedef float32x4_t F;
typedef int32x4_t I;

inline F f_zero() { return vdupq_n_f32(0); }
inline F f_set1(float x) { return vdupq_n_f32(x); }
inline F f_load(const float *p) { return vld1q_f32(p); }
inline void f_store(float *p, F x) { vst1q_f32(p, x); }
inline void f_store_n(float *p, F x, int n) {
    if (n >= LANES) {
        f_store(p, x);
        return;
    }
    float all[LANES];
    f_store(all, x);
    __builtin_memcpy(p, all, (size_t)n * 4);
}
inline F f_load_n(const float *p, int n) {
    if (n >= LANES) {
        return f_load(p);
    }
    float all[LANES] = {0};
    __builtin_memcpy(all, p, (size_t)n * 4);
    return f_load(all);
}
inline F f_add(F a, F b) { return vaddq_f32(a, b); }
inline F f_sub(F a, F b) { return vsubq_f32(a, b); }
inline F f_mul(F a, F b) { return vmulq_f32(a, b); }
inline F f_div(F a, F b) { return vdivq_f32(a, b); }
inline F f_fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F f_fnma(F a, F b, F c) { return vfmsq_f32(c, a, b); }
inline F f_max(F a, F b) { return vmaxq_f32(a, b); }
inline F f_min(F a, F b) { return vminq_f32(a, b); }
inline F f_abs(F a) { return vabsq_f32(a); }
inline F f_sqrt(F a) { return vsqrtq_f32(a); }
inline F f_round(F a) { return vrndnq_f32(a); }
// a where x > limit, else 0.
inline F f_zero_unless_above(F x, float limit, F a) {
    return vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(x, vdupq_n_f32(limit)), vreinterpretq_u32_f32(a)));
}
// a * 2^n for integral n in [-252, 254], in two steps: the exponent of one factor ends at 127.
inline F f_ldexp(F a, F n) {
    const I e = vcvtnq_s32_f32(n), half = vshrq_n_s32(e, 1), rest = vsubq_s32(e, half), bias = vdupq_n_s32(127);
    a = vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23)));
    return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23)));
}
inline float f_reduce_add(F a) { return vaddvq_f32(a); }
inline float f_reduce_max(F a) { return vmaxvq_f32(a); }
inline F f_half(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p))); }
inline float half_at(const void *p) { return (float)*(const __fp16 *)p; }
inline void f_store_half(void *p, F x) { vst1_u16((uint16_t *)p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline uint32x2_t four_bytes(const uint8_t *p) {
    uint32_t x;
    __builtin_memcpy(&x, p, 4);
    return vdup_n_u32(x);
}
inline F f_i8(const uint8_t *p) {
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four_bytes(p))))));
}
// Numbers of 4 bits, less 8: bytes shifted to the right by 0 or 4.
inline F f_i4(const uint8_t *p, int shift) {
    const uint32x4_t bytes = vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four_bytes(p)))));
    const I numbers = vreinterpretq_s32_u32(vandq_u32(vshlq_u32(bytes, vdupq_n_s32(-shift)), vdupq_n_u32(15)));
    return vcvtq_f32_s32(vsubq_s32(numbers, vdupq_n_s32(8)));
}
// 2^-8 times numbers of 4 bits of exponent and 3 of mantissa (E4M3); the eighth bit is ignored.
inline F f_e4m3(const uint8_t *p) {
    const uint16x4_t words = vshl_n_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four_bytes(p)))), 7);
    return vcvt_f32_f16(vreinterpret_f16_u16(vand_u16(words, vdup_n_u16(0x3F80))));
}
inline F f_cast(I x) { return vreinterpretq_f32_s32(x); }
// 2^(e - 128) of bytes e.
inline F f_exponents(const uint8_t *p) {
    const uint16x4_t words = vget_low_u16(vmovl_u8(vreinterpret_u8_u32(four_bytes(p))));
    const I e = vreinterpretq_s32_u32(vmovl_u16(words)), one = vdupq_n_s32(1);
    const I small = vshlq_n_s32(vaddq_s32(vminq_s32(e, one), one), 21); // e = 0 and 1: not normal
    return f_cast(vmaxq_s32(vshlq_n_s32(vsubq_s32(e, one), 23), small));
}
inline F f_int(I x) { return vcvtq_f32_s32(x); }

inline int8x16_t bytes_of(I x) { return vreinterpretq_s8_s32(x); }
inline void i_forget(I &x) { __asm__("" : "+w"(x)); } // the compiler does not know what x is any more
inline I i_zero() { return vdupq_n_s32(0); }
inline I i_cast(F x) { return vreinterpretq_s32_f32(x); }
inline I i_load(const void *p) { return vreinterpretq_s32_s8(vld1q_s8((const int8_t *)p)); }
inline I i_set1(int32_t x) { return vdupq_n_s32(x); }
inline I i_bytes(int x) { return vreinterpretq_s32_s8(vdupq_n_s8((int8_t)x)); }
inline I i_and(I a, I b) { return vandq_s32(a, b); }
inline I i_xor(I a, I b) { return veorq_s32(a, b); }
// a | (b & c), where a has none of c's bits.
inline I i_or_and(I a, I b, I c) { return vbslq_s32(vreinterpretq_u32_s32(c), b, a); }
template <int N> inline I i_shl16(I a) { return vreinterpretq_s32_s16(vshlq_n_s16(vreinterpretq_s16_s32(a), N)); }
template <int N> inline I i_shr16(I a) { return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_s32(a), N)); }
// The high nibbles of all bytes.
inline I i_high4(I a) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4)); }
template <int N> inline I i_shl32(I a) { return vshlq_n_s32(a, N); }
template <int N> inline I i_sar32(I a) { return vshrq_n_s32(a, N); }
// 16 bytes of a quantized block, whose numbers take BYTES.
template <int BYTES> inline I i_chunks(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
inline I i_lookup(const int8_t *table, I index) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(index)));
}
// Weights are loaded as their value plus W::OFFSET. So sums start from minus OFFSET times the activations, which a record
// has as `start`.
template <int SHIFT> inline I i_start(I start) { return i_shl32<SHIFT>(start); }
inline I i_add(I a, I b) { return vaddq_s32(a, b); }
inline I i_start_minus(I a, I b) { return vsubq_s32(a, b); }
// Sums of int8, and what sums of products start from: `factor` times minus that.
struct ByteSums {
    int32_t first, second;
    int32_t all() const { return first + second; }
    int32_t start(int factor) const { return -factor * all(); }
};
#ifndef __ARM_FEATURE_MATMUL_INT8 // whose sums are in pairs.h
// sums[c] + products of 4 or 8 planes with the activations, 4 for each plane, at acts + 32 c; W::LARGEST bounds the
// weights (128: signed). Column by column, as these processors look far enough ahead for the next one's.
template <class W, int PLANES, int NC>
__attribute__((always_inline)) inline void i_dot(I *sums, const I *w, const int8_t *acts) {
#pragma GCC unroll 8
    for (int c = 0; c < NC; c++) {
        const int8x16_t both[2] = {vld1q_s8(acts + 32 * c), vld1q_s8(acts + 32 * c + (PLANES == 8 ? 16 : 0))};
#pragma GCC unroll 2
        for (int first = 0; first < PLANES; first += 4) {
            const int8x16_t a = both[first / 4];
            const I *v = w + first;
#ifdef __ARM_FEATURE_DOTPROD
            sums[c] = vdotq_laneq_s32(sums[c], bytes_of(v[0]), a, 0);
            sums[c] = vdotq_laneq_s32(sums[c], bytes_of(v[1]), a, 1);
            sums[c] = vdotq_laneq_s32(sums[c], bytes_of(v[2]), a, 2);
            sums[c] = vdotq_laneq_s32(sums[c], bytes_of(v[3]), a, 3);
#else
            // 16 bits hold the sum of two neighbouring columns' products, of as many planes.
            constexpr int TOGETHER = W::LARGEST <= 31 ? 4 : W::LARGEST <= 63 ? 2 : 1; // 2 * it * LARGEST * 127 < 2^15
            const I all = vreinterpretq_s32_s8(a);
            const int8x16_t each[4] = {bytes_of(vdupq_laneq_s32(all, 0)), bytes_of(vdupq_laneq_s32(all, 1)),
                                       bytes_of(vdupq_laneq_s32(all, 2)), bytes_of(vdupq_laneq_s32(all, 3))};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i += TOGETHER) { // rows 0 and 1 in the low halves, 2 and 3 in the high ones
                int16x8_t low = vmull_s8(vget_low_s8(bytes_of(v[i])), vget_low_s8(each[i]));
                int16x8_t high = vmull_high_s8(bytes_of(v[i]), each[i]);
#pragma GCC unroll 4
                for (int j = i + 1; j < i + TOGETHER; j++) {
                    low = vmlal_s8(low, vget_low_s8(bytes_of(v[j])), vget_low_s8(each[j]));
                    high = vmlal_high_s8(high, bytes_of(v[j]), each[j]);
                }
                sums[c] = vpadalq_s16(sums[c], vpaddq_s16(low, high));
            }
#endif
        }
    }
}
#endif
template <class W> constexpr int tokens_at_once() { return MAX_TILE; }

// ---- integer scales ----

inline int16x4_t four_words(const uint8_t *p) { return vget_low_s16(vreinterpretq_s16_u16(vmovl_u8(vreinterpret_u8_u32(four_bytes(p))))); }
inline int16x4_t four_signed_words(const uint8_t *p) { return vget_low_s16(vmovl_s8(vreinterpret_s8_u32(four_bytes(p)))); }
// A byte for each lane, to be multiplied with what is summed in it.
inline I i_scales_u8(const uint8_t *p) { return vmovl_s16(four_words(p)); }
inline I i_scales_i8(const uint8_t *p) { return vmovl_s16(four_signed_words(p)); }
inline I i_mul_add(I a, I b, I c) { return vmlaq_s32(c, a, b); }
constexpr bool WORD_PRODUCTS = false;
inline I i_mul_add_words(I a, I b, I c) { return i_mul_add(a, b, c); }
// Two bytes for each lane, LANES apart, to be multiplied with two 16-bit numbers and added: the first ones of all lanes,
// then the second ones.
template <bool SIGNED> inline I i_pairs(const uint8_t *p) {
    uint8x8_t both = vld1_u8(p);
    return vreinterpretq_s32_s16(SIGNED ? vmovl_s8(vreinterpret_s8_u8(both)) : vreinterpretq_s16_u16(vmovl_u8(both)));
}
// sum + products of each lane's pair with that of `acts`.
inline I i_dot_pairs(I sum, I pairs, int32_t acts) {
    const int16x8_t w = vreinterpretq_s16_s32(pairs);
    const int16x4_t a = vreinterpret_s16_s32(vdup_n_s32(acts));
    return vmlal_high_lane_s16(vmlal_lane_s16(sum, vget_low_s16(w), a, 0), w, a, 1);
}
// sum + products of 4 planes, none above 31, with one of activations, from registers.
inline I i_dot_registers(I sum, const I *w, I a) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        sum = vmmlaq_s32(sum, bytes_of(w[i]), bytes_of(a));
    }
    return sum;
#elif defined(__ARM_FEATURE_DOTPROD)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        sum = vdotq_s32(sum, bytes_of(w[i]), bytes_of(a));
    }
    return sum;
#else
    int16x8_t low = vmull_s8(vget_low_s8(bytes_of(w[0])), vget_low_s8(bytes_of(a)));
    int16x8_t high = vmull_high_s8(bytes_of(w[0]), bytes_of(a));
#pragma GCC unroll 3
    for (int i = 1; i < 4; i++) {
        low = vmlal_s8(low, vget_low_s8(bytes_of(w[i])), vget_low_s8(bytes_of(a)));
        high = vmlal_high_s8(high, bytes_of(w[i]), bytes_of(a));
    }
    return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}
// 4 floats, rounded to nearest, as int8; `sums` is added to.
inline void i_store_bytes(int8_t *p, F x, ByteSums &sums) {
    const int16x4_t q = vqmovn_s32(vcvtnq_s32_f32(x));
    const int32_t packed = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(q, q))), 0);
    __builtin_memcpy(p, &packed, 4);
    sums.first += vaddv_s16(q);
}
// Words, double words or quad words of a and b in turns.
inline I i_low16(I a, I b) {
    return vreinterpretq_s32_s16(vzip1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
inline I i_high16(I a, I b) {
    return vreinterpretq_s32_s16(vzip2q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}
inline I i_low32(I a, I b) { return vzip1q_s32(a, b); }
inline I i_high32(I a, I b) { return vzip2q_s32(a, b); }
inline I i_low64(I a, I b) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
inline I i_high64(I a, I b) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
// Each 128 bits of x, `stride` words apart: there are no more.
inline void i_scatter(uint16_t *p, int64_t, I x) { vst1q_u16(p, vreinterpretq_u16_s32(x)); }
// 4 rows of 4 floats become 4 columns.
inline void f_transpose(F *r) {
    const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
