// One group of packed weights against a tile of quantized activations.
#pragma once

template <int LEVEL> inline void prefetch(const uint8_t *p, int bytes) {
    for (int i = 0; i < bytes; i += 64) {
        __builtin_prefetch(p + i, 0, LEVEL == 1 ? 0 : 2); // no use in any cache after this one; in the second level
    }
}

// Unrolled even where the compiler hesitates: the arrays indexed by c must end up in registers.
#define EACH_TOKEN _Pragma("GCC unroll 8") for (int c = 0; c < NC; c++)

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
    constexpr int PLANES = W::HALVES ? 4 : 8;
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
            sums[c] = i_mul_add(dots[c], i_of_rows<NC>(scales[half], first + c), sums[c]);
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
    I of_pairs[NC];
    if constexpr (W::HAS_PAIRS) {
        sum_pairs<W, NC>(header, first_acts, of_pairs);
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
        total[c] = f_fma(x, f_of_token<NC>(first_acts + 32 * NC, c), total[c]);
    }
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

// What goes with the 32 int8 of column c of a record: see isa.h. `sums`: of their halves.
inline void put_sums(int8_t *record, int nc, int c, bool is_odd, int act_block, float d, const ByteSums *sums) {
    int8_t *const meta = record + 32 * nc + 4 * c;
    const int32_t all = -(sums[0].all() + sums[1].all()), factor = act_block == 32 ? 8 : 32;
    const int32_t starts[2] = {sums[0].start(factor), sums[1].start(factor)};
    if (act_block == 32) {
        const float scaled = d * (float)all;
        const int32_t start = ByteSums{sums[0].first + sums[1].first, sums[0].second + sums[1].second}.start(factor);
        __builtin_memcpy(meta, &d, 4);
        __builtin_memcpy(meta + 4 * nc, &start, 4);
        __builtin_memcpy(meta + 8 * nc, &scaled, 4);
        __builtin_memcpy(meta + 12 * nc, &starts[0], 4);
        return;
    }
    const int16_t halves[2] = {(int16_t)-sums[0].all(), (int16_t)-sums[1].all()}, whole = (int16_t)all;
    int8_t *const even = meta - (is_odd ? record_bytes(BYTES_256, nc) : 0), *const odd = even + record_bytes(BYTES_256, nc);
    if (is_odd) {
        __builtin_memcpy(odd, halves, 4);
    } else {
        __builtin_memcpy(even, &d, 4);
        __builtin_memcpy(odd + 12 * nc, halves, 4);
    }
    __builtin_memcpy(even + 12 * nc + 2 * is_odd, &whole, 2);
    __builtin_memcpy(meta + 4 * nc, &starts[0], 4);
    __builtin_memcpy(meta + 8 * nc, &starts[1], 4);
}

void quantize_bytes(const float *x, int64_t columns, Acts acts, int64_t block0, int64_t block1, int8_t *tile, int nc,
                    int c) {
    const int act_block = act_columns(acts);
    for (int64_t b = block0; b < block1; b++) {
        const int64_t first = b * act_block, n = columns - first < act_block ? columns - first : act_block;
        F largest[2] = {f_zero(), f_zero()}; // two, as each waits for the one before it
        for (int64_t i = 0; i < n; i += 2 * LANES) {
            largest[0] = f_max(largest[0], f_abs(f_load(x + first + i)));
            largest[1] = f_max(largest[1], f_abs(f_load(x + first + i + LANES)));
        }
        const float max = f_reduce_max(f_max(largest[0], largest[1])), d = max / 127, inverse = max > 1e-30f ? 127 / max : 0;
        for (int64_t i = 0; i < n; i += 32) {
            int8_t *record = tile + (first + i) / 32 * record_bytes(acts, nc);
            ByteSums sums[2] = {};
            for (int j = 0; j < 32; j += LANES) {
                const F v = f_mul(f_load(x + first + i + j), f_set1(inverse));
                i_store_bytes(record + act_place(nc, c, j), v, sums[j / 16]);
            }
            put_sums(record, nc, c, (first + i) / 32 % 2, act_block, d, sums);
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
