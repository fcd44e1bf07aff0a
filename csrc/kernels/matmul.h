// One group of packed weights against a tile of quantized activations.
#pragma once

// f(Count<n>, first) for all tokens, n at once.
template <int N> struct Count {
    static constexpr int VALUE = N;
};
template <int NC, int AT_ONCE, int FIRST = 0, class Function>
__attribute__((always_inline)) inline void in_parts(const Function &f) {
    if constexpr (FIRST < NC) {
        constexpr int N = NC - FIRST < AT_ONCE ? NC - FIRST : AT_ONCE;
        f(Count<N>(), FIRST);
        in_parts<NC, AT_ONCE, FIRST + N>(f);
    }
}

#ifndef ES_WORD_SUMS
// sums[c] + scales[0] * products of all 8 planes; with HALVES scales[1] is that of the last 4. N of NC tokens, the first
// being `first`. `starts`: of each half, if sums start from them.
template <class W, int NC, int N>
__attribute__((always_inline)) inline void i_dot_scaled(I *sums, const I *w, const int8_t *acts, const int8_t *const *starts,
                                                        const I *scales, int first) {
    // Products of 4 planes, 16 columns, fit in 16 bits.
    constexpr bool WORDS = WORD_PRODUCTS && !W::STARTS && 16 * 127 * W::LARGEST < 1 << 15;
    constexpr int PLANES = W::HALVES || WORDS ? 4 : 8;
#pragma GCC unroll 2
    for (int half = 0; half < 8 / PLANES; half++) {
        I dots[N];
#pragma GCC unroll 8
        for (int c = 0; c < N; c++) {
            dots[c] = W::STARTS ? i_start<W::SHIFT>(i_of_token<NC>(starts[half], first + c)) : i_zero();
        }
        i_dot<W, PLANES, N>(dots, w + 4 * half, acts + 16 * half);
#pragma GCC unroll 8
        for (int c = 0; c < N; c++) {
            const I scale = i_of_rows<NC>(scales[W::HALVES ? half : 0], first + c);
            sums[c] = WORDS ? i_mul_add_words(dots[c], scale, sums[c]) : i_mul_add(dots[c], scale, sums[c]);
            i_forget(sums[c]); // else the compiler would keep both halves, to add them first
        }
    }
}
#endif

// A packet of a simple type: each step has its own scale.
template <int TYPE, int NC, int LEVEL>
__attribute__((always_inline)) inline void simple_packet(const uint8_t *header, const int8_t *acts, int64_t ahead, F *total) {
    typedef Weights<TYPE> W;
    constexpr int PARTS = W::HALVES ? 2 : 1, PLANES = 8 / PARTS;
    const uint8_t *step = header + W::HEADER;
    prefetch<LEVEL>(header + ahead, W::HEADER);
    for (int s = 0; s < W::STEPS; s++, step += W::STEP, acts += record_bytes(BYTES_32, NC)) {
        I v[8];
        W::load(step, v);
        prefetch<LEVEL>(step + ahead, W::STEP);
        const int8_t *const meta = acts + 32 * NC;
        const F min = W::PLUS_MIN ? W::minimum(header, s) : f_zero();
        for (int part = 0; part < PARTS; part++) {
            const F scale = W::scale(header, s, part);
            in_parts<NC, tokens_at_once<W>()>([&](auto n, int first) __attribute__((always_inline)) {
                constexpr int N = decltype(n)::VALUE;
                I sum[N];
#pragma GCC unroll 8
                for (int c = 0; c < N; c++) {
                    sum[c] = i_zero();
                    if constexpr (W::STARTS) {
                        const I all = i_start<W::SHIFT>(i_of_token<NC>(meta + 4 * NC, first + c));
                        const I half = i_start<W::SHIFT>(i_of_token<NC>(meta + 12 * NC, first + c));
                        sum[c] = !W::HALVES ? all : part ? i_start_minus(all, half) : half;
                    }
                }
                i_dot<W, PLANES, N>(sum, v + PLANES * part, acts + 32 * first + 16 * part);
#pragma GCC unroll 8
                for (int c = 0; c < N; c++) {
                    F &to = total[first + c];
                    const F scaled = f_mul(f_int(sum[c]), f_of_rows<NC>(scale, first + c));
                    to = f_fma(scaled, f_of_token<NC>(meta, first + c), to);
                    if (W::PLUS_MIN) {
                        to = f_fnma(f_of_rows<NC>(min, first + c), f_of_token<NC>(meta + 8 * NC, first + c), to);
                    }
                }
            });
        }
    }
}

// sum[c] = products of all pairs of a packet with what the records have for them.
template <class W, int NC>
__attribute__((always_inline)) inline void sum_pairs(const uint8_t *header, const int8_t *acts, I *sum) {
    EACH_TOKEN {
        sum[c] = i_zero();
    }
    const int8_t *meta = acts + 32 * NC; // of an even step
    for (int i = 0; i < 4; i++, meta += 2 * record_bytes(BYTES_256, NC)) {
        for (int part = 0; part < (W::HALVES ? 2 : 1); part++) {
            const I pairs = W::pairs(header, W::HALVES ? 2 * i + part : i);
            const int8_t *const of_acts = meta + 12 * NC + (W::HALVES ? record_bytes(BYTES_256, NC) - 12 * part * NC : 0);
            EACH_TOKEN {
                sum[c] = i_dot_pairs_of<NC>(sum[c], pairs, of_acts, c);
                i_forget(sum[c]); // else the compiler would keep all products, to sum them in another order
            }
        }
    }
}

// total[c] += what the sums of a packet's products stand for.
template <class W, int NC>
__attribute__((always_inline)) inline void add_packet(const uint8_t *header, const int8_t *acts, I *sum, F *total) {
    I of_pairs[NC];
    if constexpr (W::HAS_PAIRS) {
        sum_pairs<W, NC>(header, acts, of_pairs);
    }
    const F d = W::packet_scale(header), dmin = W::MINUS_MIN ? W::packet_minimum(header) : f_zero();
    EACH_TOKEN {
        if constexpr (W::HAS_PAIRS && !W::MINUS_MIN) {
            sum[c] = i_add(sum[c], i_shl32<log2_of(W::OFFSET)>(of_pairs[c]));
        }
        F x = f_mul(f_int(sum[c]), f_of_rows<NC>(d, c));
        if constexpr (W::MINUS_MIN) {
            x = f_fma(f_int(of_pairs[c]), f_of_rows<NC>(dmin, c), x);
        }
        total[c] = f_fma(x, f_of_token<NC>(acts + 32 * NC, c), total[c]);
    }
}

// A packet of a K type: integers until all its steps are summed.
template <int TYPE, int NC, int LEVEL>
__attribute__((always_inline)) inline void k_packet(const uint8_t *header, const int8_t *acts, int64_t ahead, F *total) {
    typedef Weights<TYPE> W;
    const uint8_t *step = header + W::HEADER;
    prefetch<LEVEL>(header + ahead, W::HEADER);
    const int8_t *const first_acts = acts;
    I sum[NC];
    EACH_TOKEN {
        sum[c] = i_zero();
    }
    for (int s = 0; s < W::STEPS; s++, step += W::STEP, acts += record_bytes(BYTES_256, NC)) {
        I v[8], scales[2];
        W::load(step, v);
        W::scales(header, s, scales);
        prefetch<LEVEL>(step + ahead, W::STEP);
        in_parts<NC, tokens_at_once<W>()>([&](auto n, int first) __attribute__((always_inline)) {
            constexpr int N = decltype(n)::VALUE;
            const int8_t *const starts[2] = {acts + (32 + 4) * NC, acts + (32 + 8) * NC};
            if constexpr (W::TERNARY) {
                I dots[N];
#pragma GCC unroll 8
                for (int c = 0; c < N; c++) {
                    dots[c] = i_zero();
                }
                i_dot<W, 8, N>(dots, v, acts + 32 * first);
#pragma GCC unroll 8
                for (int c = 0; c < N; c++) {
                    sum[first + c] = i_add(sum[first + c], dots[c]);
                }
            } else {
                i_dot_scaled<W, NC, N>(sum + first, v, acts + 32 * first, starts, scales, first);
            }
        });
    }
    add_packet<W, NC>(header, first_acts, sum, total);
}

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
        if constexpr (W::K_TYPE) {
            k_packet<TYPE, NC, LEVEL>(group, acts, ahead, total);
        } else {
            simple_packet<TYPE, NC, LEVEL>(group, acts, ahead, total);
        }
        group += W::HEADER + W::STEPS * W::STEP;
        acts += W::STEPS * record_bytes(BYTES_32, NC);
    }
    f_unpair<NC>(total);
    EACH_TOKEN {
        f_store_n(y[c] + first, total[c], rows);
    }
}
