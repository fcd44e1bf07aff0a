// One group of F16 or BF16 weights against a tile of activations: products and sums in float32.
#pragma once

// Columns are summed in blocks of 16: with one token, the sums of the next blocks need not wait for this one's.
constexpr int FLOAT_BLOCK = 16, FLOAT_STEP = 64 * LANES; // bytes of a step

inline F f_cast_low(I pairs) { return f_cast(i_shl32<16>(pairs)); }
inline F f_cast_high(I pairs) { return f_cast(i_and(pairs, i_set1((int32_t)0xFFFF0000))); }

// sums[c] + products of the 16 columns of `block` with the activations of token c at acts + 128 c. Of two columns of
// BF16 the second comes first, as in the processors that have an instruction for it.
template <int TYPE, int NC>
__attribute__((always_inline)) inline void float_block(F *sums, const uint8_t *block, const int8_t *acts) {
#pragma GCC unroll 16
    for (int i = 0; i < FLOAT_BLOCK; i += TYPE == F16 ? 1 : 2) {
        const uint8_t *const w = block + 2 * i * LANES;
        const F low = TYPE == F16 ? f_half(w) : f_cast_low(i_load(w));
        const F high = TYPE == F16 ? f_zero() : f_cast_high(i_load(w));
#pragma GCC unroll 8
        for (int c = 0; c < NC; c++) {
            if (TYPE == BF16) {
                sums[c] = f_fma(high, f_set1(float_at(acts + 128 * c, i + 1)), sums[c]);
            }
            sums[c] = f_fma(low, f_set1(float_at(acts + 128 * c, i)), sums[c]);
        }
    }
}

template <int TYPE, int NC, int LEVEL>
void matmul_floats(const uint8_t *group, int64_t packets, const int8_t *acts, float *const *y, int64_t first_row,
                   int rows, int64_t ahead) {
    F total[NC];
    EACH_TOKEN {
        total[c] = f_zero();
    }
    for (int64_t p = 0; p < packets; p++, group += FLOAT_STEP, acts += 128 * NC) {
        prefetch<LEVEL>(group + ahead, FLOAT_STEP);
#pragma GCC unroll 2
        for (int first = 0; first < 32; first += FLOAT_BLOCK) {
            F sums[NC];
            EACH_TOKEN {
                sums[c] = f_zero();
            }
            float_block<TYPE, NC>(sums, group + 2 * first * LANES, acts + 4 * first);
            EACH_TOKEN {
                total[c] = f_add(total[c], sums[c]);
            }
        }
    }
    EACH_TOKEN {
        f_store_n(y[c] + first_row, total[c], rows);
    }
}

#ifdef ES_ISA_BF16
#define WITH_BF16 __attribute__((target("avx512bf16")))

// As matmul_floats, bit for bit: two columns with one instruction, from activations that are pairs of BF16.
template <int, int NC, int LEVEL>
WITH_BF16 void matmul_pairs(const uint8_t *group, int64_t packets, const int8_t *acts, float *const *y,
                            int64_t first_row, int rows, int64_t ahead) {
    F total[NC];
    EACH_TOKEN {
        total[c] = f_zero();
    }
    for (int64_t p = 0; p < packets; p++, group += FLOAT_STEP, acts += 128 * NC) {
        prefetch<LEVEL>(group + ahead, FLOAT_STEP);
#pragma GCC unroll 2
        for (int first = 0; first < 32; first += FLOAT_BLOCK) {
            F sums[NC];
            EACH_TOKEN {
                sums[c] = f_zero();
            }
#pragma GCC unroll 8
            for (int i = 0; i < FLOAT_BLOCK / 2; i++) {
                const int pair = first / 2 + i;
                const __m512bh w = (__m512bh)i_load(group + 4 * pair * LANES);
                EACH_TOKEN {
                    sums[c] = _mm512_dpbf16_ps(sums[c], w, (__m512bh)i_set1(int_at(acts + 64 * c, pair)));
                }
            }
            EACH_TOKEN {
                total[c] = f_add(total[c], sums[c]);
            }
        }
    }
    EACH_TOKEN {
        f_store_n(y[c] + first_row, total[c], rows);
    }
}
#endif
