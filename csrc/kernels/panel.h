// Two groups of a K type against several tiles of a prompt, where registers hold the 16-bit sums of two groups by four tokens:
// a packet is unpacked once for all tiles, and each of a token's activations is loaded once for both groups.
#pragma once

#ifndef ES_WORD_SUMS
#define PANELS {} // instructions that multiply and add at once have no need of them
#else
#define PANELS {matmul_panel<Q2_K>, matmul_panel<Q3_K>, matmul_panel<Q4_K>, matmul_panel<Q5_K>, matmul_panel<Q6_K>}
// A step's products, of 2 groups (planes at w + 8 r) and 4 tokens from `first` on, into sums[r][c].
template <class W>
__attribute__((always_inline)) inline void panel_step(const I *w, const int8_t *record, int first, const I (*scales)[2],
                                                      I (*sums)[MAX_TILE]) {
    constexpr int AT_ONCE = W::HALVES ? 4 : planes16<W>();
    I dots[2][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const int half = W::HALVES ? i / 4 : 0;
        I plane[2] = {w[i], w[8 + i]};
        __asm__ volatile("" : "+x"(plane[0]), "+x"(plane[1])); // else each token would load them
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const I a = i_set1(int_at(record + 32 * (first + c), i));
#pragma GCC unroll 2
            for (int r = 0; r < 2; r++) {
                const I products = _mm256_maddubs_epi16(plane[r], a);
                I &dot = dots[r][c], &sum = sums[r][first + c];
                if (i % AT_ONCE) {
                    dot = _mm256_add_epi16(dot, products);
                } else if (W::STARTS) {
                    const int32_t start = int_at(record + (32 + 4 + 4 * half) * MAX_TILE, first + c);
                    dot = _mm256_add_epi16(i_start<W::SHIFT>(i_set1(start)), products);
                } else {
                    dot = products;
                }
                i_forget(dot);
                if (i % AT_ONCE == AT_ONCE - 1) {
                    sum = i_add(sum, _mm256_madd_epi16(dot, scales[r][half]));
                    i_put_down(sum);
                }
            }
        }
    }
}

template <int TYPE>
void matmul_panel(const uint8_t *group, int64_t packets, const int8_t *acts, int tiles, float *const *y, int64_t first,
                  int64_t rows) {
    typedef Weights<TYPE> W;
    constexpr int NC = MAX_TILE, PACKET = W::HEADER + W::STEPS * W::STEP;
    for (; rows > 0; rows -= 2 * LANES, first += 2 * LANES, group += 2 * packets * PACKET) {
        int64_t left = rows;
        __asm__ volatile("" : "+r"(left)); // else the compiler would split the loop and write all of it twice
        const int64_t apart = left > LANES ? packets * PACKET : 0; // of no second group the first is read again
        F total[PANEL_TILES][2][NC] = {};
        for (int64_t p = 0; p < packets; p++) {
            const uint8_t *const packet = group + p * PACKET;
            I planes[W::STEPS][16], scales[W::STEPS][2][2];
            for (int s = 0; s < W::STEPS; s++) {
                for (int r = 0; r < 2; r++) {
                    W::load(packet + r * apart + W::HEADER + s * W::STEP, planes[s] + 8 * r);
                    W::scales(packet + r * apart, s, scales[s][r]);
                }
            }
            for (int t = 0; t < tiles; t++) {
                const int8_t *const records = acts + (t * packets + p) * W::STEPS * record_bytes(BYTES_256, NC);
                I sums[2][NC] = {};
                for (int s = 0; s < W::STEPS; s++) {
                    const int8_t *const record = records + s * record_bytes(BYTES_256, NC);
                    panel_step<W>(planes[s], record, 0, scales[s], sums);
                    panel_step<W>(planes[s], record, 4, scales[s], sums);
                }
                for (int r = 0; r < 2; r++) {
                    add_packet<W, NC>(packet + r * apart, records, sums[r], total[t][r]);
                }
            }
        }
        for (int c = 0; c < tiles * NC; c++) {
            for (int64_t r = 0; r * LANES < left && r < 2; r++) {
                const int64_t n = left - r * LANES;
                f_store_n(y[c] + first + r * LANES, total[c / NC][r][c % NC], n < LANES ? (int)n : LANES);
            }
        }
    }
}
#endif
