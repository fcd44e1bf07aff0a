// Packed weights in registers: their values, scales and minima, by type.
#pragma once

// What nibbles stand for, `offset` more: so none is negative where bytes are to be unsigned.
struct Values {
    int8_t bytes[16];
    constexpr Values plus(int offset) const {
        Values all = {};
        for (int i = 0; i < 16; i++) {
            all.bytes[i] = (int8_t)(bytes[i] + offset);
        }
        return all;
    }
};
constexpr Values IQ4_VALUES = {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
// IQ1, IQ2, IQ3_XXS: codes of codebooks.h. In units of 1/8, 1/8 and, as all are even, 1/2.
constexpr Values IQ1_VALUES = {{-7, -9, 1, -1, 9, 7}}, IQ2_VALUES = {{8, 25, 43, 0, -8, -25, -43}};
constexpr Values IQ3_VALUES = {{2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31}};
// Of E2M1 (OCP Microscaling Formats 1.0, 5.3.3), doubled.
constexpr Values E2M1_VALUES = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

template <int TYPE> struct Weights {
    static constexpr Format FORMAT = FORMATS[TYPE];
    static constexpr int STEPS = FORMAT.steps, HEADER = FORMAT.header * LANES, STEP = FORMAT.step * LANES;
    static constexpr bool K_TYPE = STEPS == 8, TERNARY = TYPE == TQ1_0 || TYPE == TQ2_0;
    static constexpr bool HALVES = TYPE == Q2_K || TYPE == Q3_K || TYPE == Q6_K || TYPE == NVFP4 || FORMAT.two_scales;
    static constexpr bool IQ1 = TYPE == IQ1_S || TYPE == IQ1_M, IQ2 = TYPE == IQ2_XXS || TYPE == IQ2_XS || TYPE == IQ2_S;
    static constexpr bool IQ = TYPE == IQ4_XS || IQ1 || IQ2 || TYPE == IQ3_XXS || TYPE == IQ3_S;
    static constexpr bool MINUS_MIN = TYPE == Q2_K || TYPE == Q4_K || TYPE == Q5_K;
    static constexpr bool PLUS_MIN = TYPE == Q4_1 || TYPE == Q5_1;
    static constexpr bool FEW_BITS = TYPE == Q1_0 || TYPE == Q2_0; // one scale for a packet
    static constexpr bool FP4 = TYPE == MXFP4 || TYPE == NVFP4, IQ4 = TYPE == IQ4_NL || TYPE == IQ4_XS;
    static constexpr bool BYTES = TYPE == Q8_0 || IQ4 || (SIGNED_BYTES && IQ2 && HALVES); // signed where they can be
    // Loaded values stand for value - OFFSET; those of Q3_K are 8 times as large as the weights, so that their offset is
    // Q6_K's; those of Q1_0 and Q2_0 too, as records have 8 times the activations' sums.
    static constexpr int OFFSET = TERNARY                                                      ? 1
                                  : TYPE == Q4_0 || FEW_BITS                                   ? 8
                                  : TYPE == Q5_0 || TYPE == IQ1_S || TYPE == IQ3_S || FP4      ? 16
                                  : TYPE == Q3_K || TYPE == Q6_K || TYPE == IQ1_M || TYPE == IQ3_XXS ? 32
                                  : IQ2 && !BYTES                                              ? 64
                                  : BYTES && !SIGNED_BYTES                                     ? 128
                                                                                               : 0;
    // What scales are to be multiplied with, as values are loaded in other units: exact.
    static constexpr float UNIT = TYPE == Q3_K || IQ1 || IQ2 || FEW_BITS ? 0.125f : TYPE == IQ3_XXS ? 0.5f : 1;
    // Whether sums of products start at OFFSET times minus the sum of the activations. Where not, `pairs` has it.
    static constexpr bool STARTS = OFFSET && (!K_TYPE || HALVES);
    static constexpr int SHIFT = STARTS ? log2_of(OFFSET) - (K_TYPE ? 5 : 3) : 0; // of what records have: see isa.h
    // Whether shuffles have time to spread activations: in the others they look up or the sums take all registers.
    static constexpr bool SPREAD = TYPE == Q4_0 || TYPE == Q8_0 || TYPE == Q3_K || TYPE == Q6_K;
    static constexpr int LARGEST = BYTES                                                         ? 128
                                   : IQ2                                                         ? 107
                                   : TYPE == Q3_K || TYPE == Q6_K || TYPE == IQ1_M || TYPE == IQ3_XXS ? 63
                                   : FORMAT.step == 20 || FP4 || TYPE == IQ1_S || TYPE == IQ3_S || FEW_BITS ? 31
                                   : TERNARY                                                     ? 2
                                                                                                 : 15;

    // The 8 planes of a step, columns 4v.. in plane v.
    __attribute__((always_inline)) static inline void load(const uint8_t *p, I *v) {
        constexpr int PLANE = LANES * 4;
        if (TYPE == Q8_0) {
            for (int i = 0; i < 8; i++) {
                v[i] = i_load(p + i * PLANE); // packed as this instruction set wants them
            }
            return;
        }
        if (TYPE == Q3_K) {
            const I bits = i_bytes(7 << 3), low = i_bytes(3 << 3), high = i_bytes(4 << 3);
            const I a = i_load(p), b = i_load(p + PLANE), c = i_load(p + 2 * PLANE);
            v[0] = i_and(i_shl16<3>(a), bits);
            v[1] = i_and(i_shl16<3>(b), bits);
            v[2] = i_and(i_shl16<3>(c), bits);
            v[3] = i_and(a, bits);
            v[4] = i_and(b, bits);
            v[5] = i_and(c, bits);
            v[6] = i_or_and(i_and(i_shr16<3>(a), low), i_shr16<1>(c), high);
            v[7] = i_or_and(i_and(i_shr16<3>(b), low), i_shr16<2>(c), high);
            return;
        }
        if (FORMAT.step == 12) {
            static constexpr Values VALUES = (IQ1 ? IQ1_VALUES : IQ2_VALUES).plus(OFFSET);
            const I bits = i_bytes(7), low = i_bytes(3), high = i_bytes(4);
            const I a = i_load(p), b = i_load(p + PLANE), c = i_load(p + 2 * PLANE);
            v[0] = i_and(a, bits);
            v[1] = i_and(b, bits);
            v[2] = i_and(c, bits);
            v[3] = i_and(i_shr16<3>(a), bits);
            v[4] = i_and(i_shr16<3>(b), bits);
            v[5] = i_and(i_shr16<3>(c), bits);
            v[6] = i_or_and(i_and(i_shr16<6>(a), low), i_shr16<4>(c), high);
            v[7] = i_or_and(i_and(i_shr16<6>(b), low), i_shr16<5>(c), high);
            for (int i = 0; i < 8; i++) {
                v[i] = i_lookup(VALUES.bytes, v[i]);
            }
            return;
        }
        if (TYPE == IQ3_S) { // 2 c + 1
            const I one = i_bytes(1), twice = i_bytes(30);
            for (int i = 0; i < 4; i++) {
                const I both = i_load(p + i * PLANE);
                v[i] = i_or_and(one, i_shl16<1>(both), twice);
                v[i + 4] = i_or_and(one, i_shr16<3>(both), twice);
            }
            return;
        }
        if (TYPE == Q1_0) {
            const I bits = i_load(p), bit = i_bytes(16);
            v[0] = i_and(i_shl16<4>(bits), bit);
            v[1] = i_and(i_shl16<3>(bits), bit);
            v[2] = i_and(i_shl16<2>(bits), bit);
            v[3] = i_and(i_shl16<1>(bits), bit);
            v[4] = i_and(bits, bit);
            v[5] = i_and(i_shr16<1>(bits), bit);
            v[6] = i_and(i_shr16<2>(bits), bit);
            v[7] = i_and(i_shr16<3>(bits), bit);
            return;
        }
        if (TYPE == Q2_0) {
            const I bits = i_bytes(3 << 3);
            for (int i = 0; i < 2; i++) {
                const I four = i_load(p + i * PLANE);
                v[4 * i] = i_and(i_shl16<3>(four), bits);
                v[4 * i + 1] = i_and(i_shl16<1>(four), bits);
                v[4 * i + 2] = i_and(i_shr16<1>(four), bits);
                v[4 * i + 3] = i_and(i_shr16<3>(four), bits);
            }
            return;
        }
        if (FORMAT.step == 8) {
            const I bits = i_bytes(3);
            for (int i = 0; i < 2; i++) {
                const I four = i_load(p + i * PLANE);
                v[4 * i] = i_and(four, bits);
                v[4 * i + 1] = i_and(i_shr16<2>(four), bits);
                v[4 * i + 2] = i_and(i_shr16<4>(four), bits);
                v[4 * i + 3] = i_and(i_shr16<6>(four), bits);
            }
            return;
        }
        const I low = i_bytes(15);
        for (int i = 0; i < 4; i++) {
            I both = i_load(p + i * PLANE);
            i_forget(both); // else the compiler would load it twice
            v[i] = i_and(both, low);
            v[i + 4] = i_high4(both);
        }
        if (IQ4 || FP4 || TYPE == IQ3_XXS) {
            static constexpr Values VALUES = (IQ4 ? IQ4_VALUES : FP4 ? E2M1_VALUES : IQ3_VALUES).plus(OFFSET);
            for (int i = 0; i < 8; i++) {
                v[i] = i_lookup(VALUES.bytes, v[i]);
            }
        }
        if (FORMAT.step == 20) {
            const I h = i_load(p + 4 * PLANE), bit = i_bytes(16);
            v[0] = i_or_and(v[0], i_shl16<4>(h), bit);
            v[1] = i_or_and(v[1], i_shl16<3>(h), bit);
            v[2] = i_or_and(v[2], i_shl16<2>(h), bit);
            v[3] = i_or_and(v[3], i_shl16<1>(h), bit);
            v[4] = i_or_and(v[4], h, bit);
            v[5] = i_or_and(v[5], i_shr16<1>(h), bit);
            v[6] = i_or_and(v[6], i_shr16<2>(h), bit);
            v[7] = i_or_and(v[7], i_shr16<3>(h), bit);
        }
        if (FORMAT.step == 24) {
            const I bits = i_bytes(0x30);
            for (int i = 0; i < 2; i++) {
                const I h = i_load(p + (4 + i) * PLANE);
                v[4 * i] = i_or_and(v[4 * i], i_shl16<4>(h), bits);
                v[4 * i + 1] = i_or_and(v[4 * i + 1], i_shl16<2>(h), bits);
                v[4 * i + 2] = i_or_and(v[4 * i + 2], h, bits);
                v[4 * i + 3] = i_or_and(v[4 * i + 3], i_shr16<2>(h), bits);
            }
        }
    }

    // ---- simple types: the scale, of 16 columns with HALVES, and the minimum of a step ----
    static inline F scale(const uint8_t *header, int s, int half) {
        if (TYPE == MXFP4) {
            return f_exponents(header + LANES * s);
        }
        if (TYPE == NVFP4) { // 2^-8 from f_e4m3, half as its values are doubled
            return f_mul(f_e4m3(header + LANES * (2 * s + half)), f_set1(128));
        }
        return FEW_BITS ? f_mul(f_half(header), f_set1(UNIT)) : f_half(header + 2 * LANES * s);
    }
    static inline F minimum(const uint8_t *header, int s) { return f_half(header + 2 * LANES * (2 + s)); }

    // ---- K types ----
    static inline F packet_scale(const uint8_t *header) {
        const F d = f_half(header);
        return UNIT == 1 ? d : f_mul(d, f_set1(UNIT));
    }
    static inline F packet_minimum(const uint8_t *header) { return f_half(header + 2 * LANES); }
    static constexpr int SMALL = IQ ? 2 : 4; // bytes of a row before its small scales
    // The small scales of a step, with HALVES two of them.
    static inline void scales(const uint8_t *header, int s, I *both) {
        for (int half = 0; half < (HALVES ? 2 : 1); half++) {
            const uint8_t *const small = header + (SMALL + (HALVES ? 2 * s + half : s)) * LANES;
            both[half] = MINUS_MIN ? i_scales_u8(small) : i_scales_i8(small);
            both[half] = TYPE == Q2_K ? i_and(both[half], i_set1(0x000F000F)) : both[half];
        }
    }
    // What is multiplied with sums of activations and not with weights, two by two: the minima; or what a step is scaled
    // with, where OFFSET is to be taken off and the products' sums do not start from it. Of 32 columns, or of 16 with HALVES.
    static constexpr bool HAS_PAIRS = MINUS_MIN || (K_TYPE && OFFSET && !STARTS);
    static inline I pairs(const uint8_t *header, int i) {
        if (TERNARY) {
            return i_set1(0x00010001);
        }
        const uint8_t *const small = header + (SMALL + 2 * i + (MINUS_MIN && !HALVES ? 8 : 0)) * LANES;
        const I both = i_pairs<!MINUS_MIN>(small);
        return TYPE == Q2_K ? i_shr16<4>(both) : both;
    }
};
