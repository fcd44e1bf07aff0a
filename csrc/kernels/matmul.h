// One group of packed weights against a tile of quantized activations.
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
// Of E2M1 (OCP Microscaling Formats 1.0, 5.3.3), doubled.
constexpr Values E2M1_VALUES = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};

constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

template <int TYPE> struct Weights {
    static constexpr Format FORMAT = FORMATS[TYPE];
    static constexpr int STEPS = FORMAT.steps, HEADER = FORMAT.header * LANES, STEP = FORMAT.step * LANES;
    static constexpr bool K_TYPE = STEPS == 8, TERNARY = TYPE == TQ1_0 || TYPE == TQ2_0;
    static constexpr bool HALVES = TYPE == Q2_K || TYPE == Q3_K || TYPE == Q6_K || TYPE == NVFP4;
    static constexpr bool MINUS_MIN = TYPE == Q2_K || TYPE == Q4_K || TYPE == Q5_K;
    static constexpr bool PLUS_MIN = TYPE == Q4_1 || TYPE == Q5_1;
    static constexpr bool FP4 = TYPE == MXFP4 || TYPE == NVFP4, IQ4 = TYPE == IQ4_NL || TYPE == IQ4_XS;
    static constexpr bool BYTES = TYPE == Q8_0 || IQ4;
    // Loaded values stand for value - OFFSET; those of Q3_K are 8 times as large as the weights, so that their offset is
    // Q6_K's.
    static constexpr int OFFSET = TERNARY                      ? 1
                                  : TYPE == Q4_0               ? 8
                                  : TYPE == Q5_0 || FP4        ? 16
                                  : TYPE == Q3_K || TYPE == Q6_K ? 32
                                  : BYTES && !SIGNED_BYTES     ? 128
                                                               : 0;
    // Whether shuffles have time to spread activations: in the others they look up or the sums take all registers.
    static constexpr bool SPREAD = TYPE == Q4_0 || TYPE == Q8_0 || TYPE == Q3_K || TYPE == Q6_K;
    static constexpr int LARGEST = BYTES                                  ? 128
                                   : TYPE == Q3_K || TYPE == Q6_K         ? 63
                                   : FORMAT.step == 20 || FP4             ? 31
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
            const I both = i_load(p + i * PLANE);
            v[i] = i_and(both, low);
            v[i + 4] = i_high4(both);
        }
        if (IQ4 || FP4) {
            static constexpr Values VALUES = (IQ4 ? IQ4_VALUES : E2M1_VALUES).plus(OFFSET);
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

    static inline F packet_scale(const uint8_t *header) {
        const F d = f_half(header);
        return TYPE == Q3_K ? f_mul(d, f_set1(0.125f)) : d; // exact
    }
    static inline F packet_minimum(const uint8_t *header) {
        const F dmin = f_half(header + 2 * LANES);
        return TYPE == Q2_K ? f_mul(dmin, f_set1(1 / 32.0f)) : dmin; // as isa.h has multiplied by 32
    }
    // Scales of a step; `half` 0 or 1 where 16 columns have their own.
    static inline F scale(const uint8_t *header, F d, int s, int half) {
        if (TYPE == MXFP4) {
            return f_exponents(header + LANES * s);
        }
        if (TYPE == NVFP4) { // 2^-8 from f_e4m3, half as its values are doubled
            return f_mul(f_e4m3(header + LANES * (2 * s + half)), f_set1(128));
        }
        if (TERNARY) {
            return d;
        }
        if (!K_TYPE) {
            return f_half(header + 2 * LANES * s);
        }
        const uint8_t *small = header + (TYPE == IQ4_XS ? 2 : 4) * LANES + (HALVES ? 2 * s + half : s) * LANES;
        return f_mul(d, TYPE == Q2_K ? f_low4(small) : MINUS_MIN ? f_u8(small) : f_i8(small));
    }
    static inline F minimum(const uint8_t *header, F dmin, int s, int half) {
        if (TYPE == Q2_K) {
            return f_mul(dmin, f_high4(header + (4 + 2 * s + half) * LANES));
        }
        return K_TYPE ? f_mul(dmin, f_u8(header + (4 + 8 + s) * LANES)) : f_half(header + 2 * LANES * (2 + s));
    }

    // Where the sum of a step, or of a half of it, begins: at OFFSET times minus the activations' sum. K types of 32
    // columns add it as floats instead, exactly, as these have it in `meta` (isa.h) only so.
    static constexpr bool FLOAT_OFFSET = K_TYPE && !HALVES && OFFSET != 0;
    template <int NC> static inline I begin(const int8_t *meta, int half, int c) {
        if (OFFSET == 0 || FLOAT_OFFSET) {
            return i_zero();
        }
        if (K_TYPE) {
            return i_shl32<log2_of(OFFSET) - 5>(i_of_token<NC>(meta + 4 * (2 + half) * NC, c));
        }
        const int8_t *whole = meta + 4 * NC, *first = meta + 4 * 3 * NC;
        const I sum = !HALVES  ? i_of_token<NC>(whole, c)
                      : !half ? i_of_token<NC>(first, c)
                              : i_of_difference<NC>(whole, first, c);
        return i_shl32<log2_of(OFFSET) - 3>(sum);
    }
    template <int NC> static inline F as_float(I sum, const int8_t *meta, int c) {
        return FLOAT_OFFSET ? f_fma(f_set1(OFFSET), f_of_token<NC>(meta + 4 * NC, c), f_int(sum)) : f_int(sum);
    }
};

template <int LEVEL> inline void prefetch(const uint8_t *p, int bytes) {
    for (int i = 0; i < bytes; i += 64) {
        __builtin_prefetch(p + i, 0, LEVEL == 1 ? 0 : 2); // no use in any cache after this one; in the second level
    }
}

// Unrolled even where the compiler hesitates: the arrays indexed by c must end up in registers.
#define EACH_TOKEN _Pragma("GCC unroll 8") for (int c = 0; c < NC; c++)

// A level of prefetching is its own function: asking for it in the loop costs 1 to 2 % of the time from cache.
template <int TYPE, int NC, int LEVEL>
void matmul(const uint8_t *group, int64_t packets, const int8_t *acts, float *const *y, int64_t first, int rows,
            int64_t ahead) {
    typedef Weights<TYPE> W;
    F total[NC];
    EACH_TOKEN {
        total[c] = f_zero();
    }
    for (int64_t p = 0; p < packets; p++) {
        const uint8_t *header = group, *step = group + W::HEADER;
        prefetch<LEVEL>(header + ahead, W::HEADER);
        const F d = W::K_TYPE ? W::packet_scale(header) : f_zero();
        const F dmin = W::MINUS_MIN ? W::packet_minimum(header) : f_zero();
        F of_packet[NC]; // K types: sums under the packet's activation scale
        EACH_TOKEN {
            of_packet[c] = f_zero();
        }
        const int8_t *meta = acts;
        for (int s = 0; s < W::STEPS; s++, step += W::STEP, acts += record_bytes(BYTES_32, NC)) {
            I v[8];
            W::load(step, v);
            prefetch<LEVEL>(step + ahead, W::STEP);
            meta = acts + 32 * NC;
            I sum[NC];
            if constexpr (W::HALVES) {
                for (int half = 0; half < 2; half++) {
                    const F scale = W::scale(header, d, s, half);
                    const F min = W::MINUS_MIN ? W::minimum(header, dmin, s, half) : f_zero();
                    EACH_TOKEN { sum[c] = W::template begin<NC>(meta, half, c); }
                    i_dot<4, W::LARGEST, W::SPREAD, NC>(sum, v + 4 * half, acts + 16 * half);
                    EACH_TOKEN {
                        if (!W::K_TYPE) {
                            total[c] =
                                f_fma(f_mul(f_int(sum[c]), f_of_rows<NC>(scale, c)), f_of_token<NC>(meta, c), total[c]);
                            continue;
                        }
                        of_packet[c] = f_fma(f_int(sum[c]), f_of_rows<NC>(scale, c), of_packet[c]);
                        if (W::MINUS_MIN) {
                            const F of_half = f_int(i_of_token<NC>(meta + 4 * (2 + half) * NC, c));
                            of_packet[c] = f_fma(f_of_rows<NC>(min, c), of_half, of_packet[c]);
                        }
                    }
                }
                continue;
            }
            EACH_TOKEN { sum[c] = W::template begin<NC>(meta, 0, c); }
            i_dot<8, W::LARGEST, W::SPREAD, NC>(sum, v, acts);
            const F scale = W::scale(header, d, s, 0);
            const F min = W::MINUS_MIN || W::PLUS_MIN ? W::minimum(header, dmin, s, 0) : f_zero();
            EACH_TOKEN {
                if (W::K_TYPE) {
                    of_packet[c] = f_fma(W::template as_float<NC>(sum[c], meta, c), f_of_rows<NC>(scale, c), of_packet[c]);
                    if (W::MINUS_MIN) {
                        of_packet[c] = f_fma(f_of_rows<NC>(min, c), f_of_token<NC>(meta + 4 * NC, c), of_packet[c]);
                    }
                } else {
                    total[c] = f_fma(f_mul(f_int(sum[c]), f_of_rows<NC>(scale, c)), f_of_token<NC>(meta, c), total[c]);
                    if (W::PLUS_MIN) {
                        total[c] = f_fnma(f_of_rows<NC>(min, c), f_of_token<NC>(meta + 4 * 2 * NC, c), total[c]);
                    }
                }
            }
        }
        if (W::K_TYPE) {
            EACH_TOKEN {
                total[c] = f_fma(of_packet[c], f_of_token<NC>(meta, c), total[c]);
            }
        }
        group = step;
    }
    f_unpair<NC>(total);
    EACH_TOKEN {
        f_store_n(y[c] + first, total[c], rows);
    }
}

void quantize_bytes(const float *x, int64_t columns, Acts acts, int64_t block0, int64_t block1, int8_t *tile, int nc,
                    int c) {
    const int act_block = act_columns(acts);
    for (int64_t b = block0; b < block1; b++) {
        const int64_t first = b * act_block, n = columns - first < act_block ? columns - first : act_block;
        F largest = f_zero();
        for (int64_t i = 0; i < n; i += LANES) {
            largest = f_max(largest, f_abs(f_load(x + first + i)));
        }
        const float max = f_reduce_max(largest), d = max / 127, inverse = max > 1e-30f ? 127 / max : 0;
        for (int64_t i = 0; i < n; i += 32) {
            int8_t *record = tile + (first + i) / 32 * record_bytes(acts, nc);
            int32_t sums[2] = {0, 0};
            for (int j = 0; j < 32; j += LANES) {
                const F v = f_mul(f_load(x + first + i + j), f_set1(inverse));
                sums[j / 16] += i_store_bytes(record + act_place(nc, c, j), v);
            }
            // Minus the sums, as the kernels add them: see isa.h.
            const float sum = (float)-(sums[0] + sums[1]), scaled = d * sum;
            const int32_t by8 = -8 * (sums[0] + sums[1]), first_by8 = -8 * sums[0];
            const int32_t by32[2] = {-32 * sums[0], -32 * sums[1]};
            int8_t *meta = record + 32 * nc + 4 * c;
            __builtin_memcpy(meta, &d, 4);
            if (act_block == 32) {
                __builtin_memcpy(meta + 4 * nc, &by8, 4);
                __builtin_memcpy(meta + 8 * nc, &scaled, 4);
                __builtin_memcpy(meta + 12 * nc, &first_by8, 4);
            } else {
                __builtin_memcpy(meta + 4 * nc, &sum, 4);
                __builtin_memcpy(meta + 8 * nc, &by32[0], 4);
                __builtin_memcpy(meta + 12 * nc, &by32[1], 4);
            }
        }
    }
    if (block1 * act_block >= columns && columns / 32 % 2) { // the last packet's second step is not there
        int8_t *record = tile + columns / 32 * record_bytes(acts, nc);
        for (int j = 0; j < 32; j += 8) {
            __builtin_memset(record + act_place(nc, c, j), 0, 8);
        }
        for (int k = 0; k < 4; k++) {
            __builtin_memset(record + 32 * nc + 4 * c + 4 * nc * k, 0, 4);
        }
    }
}
