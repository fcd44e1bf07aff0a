// The small operations between the matrix products, on rows of floats.
#pragma once

template <class Function> inline void each1(int64_t n, const float *a, float *y, Function f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f_store(y + i, f(f_load(a + i)));
    }
    if (i < n) {
        f_store_n(y + i, f(f_load_n(a + i, (int)(n - i))), (int)(n - i));
    }
}
template <class Function> inline void each2(int64_t n, const float *a, const float *b, float *y, Function f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f_store(y + i, f(f_load(a + i), f_load(b + i)));
    }
    if (i < n) {
        const int rest = (int)(n - i);
        f_store_n(y + i, f(f_load_n(a + i, rest), f_load_n(b + i, rest)), rest);
    }
}

// Of the squares of x - center.
float sum_squares(int64_t n, const float *x, float center) {
    F total = f_zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const F v = f_sub(f_load(x + i), f_set1(center));
        total = f_fma(v, v, total);
    }
    if (i < n) {
        float rest[LANES];
        for (int64_t j = 0; j < LANES; j++) {
            rest[j] = i + j < n ? x[i + j] - center : 0;
        }
        const F v = f_load(rest);
        total = f_fma(v, v, total);
    }
    return f_reduce_add(total);
}

float sum(int64_t n, const float *x) {
    F total = f_zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        total = f_add(total, f_load(x + i));
    }
    if (i < n) {
        total = f_add(total, f_load_n(x + i, (int)(n - i)));
    }
    return f_reduce_add(total);
}

void rms_norm(int64_t n, const float *x, float eps, float *y) {
    const F factor = f_set1(1 / __builtin_sqrtf(sum_squares(n, x, 0) / (float)n + eps));
    each1(n, x, y, [=](F v) { return f_mul(v, factor); });
}

void norm(int64_t n, const float *x, float eps, float *y) {
    const float mean = sum(n, x) / (float)n;
    const F factor = f_set1(1 / __builtin_sqrtf(sum_squares(n, x, mean) / (float)n + eps));
    each1(n, x, y, [=](F v) { return f_mul(f_sub(v, f_set1(mean)), factor); });
}

void l2_norm(int64_t n, const float *x, float eps, float *y) {
    const float length = __builtin_sqrtf(sum_squares(n, x, 0));
    const F factor = f_set1(1 / (length > eps ? length : eps));
    each1(n, x, y, [=](F v) { return f_mul(v, factor); });
}

#define BINARY(NAME, FUNCTION)                                                                                        \
    void NAME(int64_t n, const float *a, const float *b, float *y) {                                                  \
        each2(n, a, b, y, [](F u, F v) { return FUNCTION(u, v); });                                                   \
    }
BINARY(add, f_add)
BINARY(sub, f_sub)
BINARY(mul, f_mul)
BINARY(divide, f_div)

#define UNARY(NAME, EXPRESSION)                                                                                       \
    void NAME(int64_t n, const float *x, [[maybe_unused]] float a, [[maybe_unused]] float b, float *y) {              \
        each1(n, x, y, [=](F v) { return EXPRESSION; });                                                              \
    }
UNARY(scale, f_fma(v, f_set1(a), f_set1(b)))
UNARY(clamp, f_clamp(v, a, b))
UNARY(square, f_mul(v, v))
UNARY(square_root, f_sqrt(v))
UNARY(negative, f_neg(v))
UNARY(exponential, f_exp(f_min(v, f_set1(88))))
UNARY(relu, f_max(v, f_zero()))
UNARY(tanh_of, f_tanh(v))
UNARY(sigmoid, f_sigmoid(v))
UNARY(silu, f_silu(v))
UNARY(gelu, f_gelu(v))
UNARY(gelu_erf, f_gelu_erf(v))

// `u` is the gate, `v` what it lets through.
#define GATED(NAME, EXPRESSION)                                                                                       \
    void NAME(int64_t n, const float *x, const float *g, [[maybe_unused]] float alpha, [[maybe_unused]] float limit,  \
              float *y) {                                                                                             \
        each2(n, x, g, y, [=](F u, F v) { return EXPRESSION; });                                                      \
    }
GATED(reglu, f_mul(f_max(u, f_zero()), v))
GATED(geglu, f_mul(f_gelu(u), v))
GATED(swiglu, f_mul(f_silu(u), v))
GATED(geglu_quick, f_mul(f_mul(u, f_sigmoid(f_mul(f_set1(1.702f), u))), v))
GATED(swiglu_clamp, f_mul(f_silu(f_min(u, f_set1(limit))), f_clamp(v, -limit, limit)))

// That of gpt-oss: x sigmoid(alpha x) (y + 1).
void swiglu_oai(int64_t n, const float *x, const float *g, float alpha, float limit, float *y) {
    each2(n, x, g, y, [=](F u, F v) {
        u = f_min(u, f_set1(limit));
        const F gate = f_div(u, f_add(f_set1(1), f_exp_neg(f_mul(f_set1(alpha), u))));
        return f_mul(gate, f_add(f_clamp(v, -limit, limit), f_set1(1)));
    });
}

void soft_max(int64_t n, const float *x, float factor, float *y) {
    F largest_of[2] = {f_set1(-__builtin_inff()), f_set1(-__builtin_inff())}; // two, as each waits for the one before it
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        largest_of[0] = f_max(largest_of[0], f_mul(f_load(x + i), f_set1(factor)));
        largest_of[1] = f_max(largest_of[1], f_mul(f_load(x + i + LANES), f_set1(factor)));
    }
    float largest = f_reduce_max(f_max(largest_of[0], largest_of[1]));
    for (; i < n; i++) {
        largest = x[i] * factor > largest ? x[i] * factor : largest;
    }
    each1(n, x, y, [=](F v) { return f_exp(f_sub(f_mul(v, f_set1(factor)), f_set1(largest))); });
    scale(n, y, 1 / sum(n, y), 0, y);
}

// Products of n floats with those of up to MAX_TILE others.
template <int NC> void dots_of(int64_t n, const float *w, const float *const *x, float *y) {
    F total[NC];
    EACH_TOKEN {
        total[c] = f_zero();
    }
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const F v = f_load(w + i);
        EACH_TOKEN {
            total[c] = f_fma(v, f_load(x[c] + i), total[c]);
        }
    }
    if (i < n) {
        const F v = f_load_n(w + i, (int)(n - i));
        EACH_TOKEN {
            total[c] = f_fma(v, f_load_n(x[c] + i, (int)(n - i)), total[c]);
        }
    }
    EACH_TOKEN {
        y[c] = f_reduce_add(total[c]);
    }
}
void dots(int64_t n, const float *w, const float *const *x, int count, float *y) {
    static void (*const sizes[MAX_TILE])(int64_t, const float *, const float *const *, float *) = {
        dots_of<1>, dots_of<2>, dots_of<3>, dots_of<4>, dots_of<5>, dots_of<6>, dots_of<7>, dots_of<8>};
    sizes[count - 1](n, w, x, y);
}

void to_half(int64_t n, const float *x, uint16_t *y) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        f_store_half(y + i, f_load(x + i));
    }
    if (i < n) {
        uint16_t rest[LANES];
        f_store_half(rest, f_load_n(x + i, (int)(n - i)));
        __builtin_memcpy(y + i, rest, (size_t)(n - i) * 2);
    }
}

void to_q8(int64_t n, const float *x, uint8_t *y) {
    for (int64_t i = 0; i < n; i += 32, y += CACHE_BLOCK[Q8_CACHE]) {
        F largest = f_zero();
        for (int j = 0; j < 32; j += LANES) {
            largest = f_max(largest, f_abs(f_load(x + i + j)));
        }
        const float max = f_reduce_max(largest), inverse = max > 1e-30f ? 127 / max : 0;
        uint16_t scale[LANES];
        f_store_half(scale, f_set1(max / 127));
        __builtin_memcpy(y, scale, 2);
        ByteSums unused = {};
        for (int j = 0; j < 32; j += LANES) {
            i_store_bytes((int8_t *)y + 2 + j, f_mul(f_load(x + i + j), f_set1(inverse)), unused);
        }
    }
}

void to_q4(int64_t n, const float *x, uint8_t *y) {
    for (int64_t i = 0; i < n; i += 32, y += CACHE_BLOCK[Q4_CACHE]) {
        F largest = f_load(x + i), smallest = largest;
        for (int j = LANES; j < 32; j += LANES) {
            largest = f_max(largest, f_load(x + i + j));
            smallest = f_min(smallest, f_load(x + i + j));
        }
        const float max = f_reduce_max(largest), min = -f_reduce_max(f_neg(smallest));
        const float most = max > -min ? max : min; // becomes -8, whatever its sign
        const float inverse = most > 1e-30f || most < -1e-30f ? -8 / most : 0;
        uint16_t scale[LANES];
        f_store_half(scale, f_set1(most / -8));
        __builtin_memcpy(y, scale, 2);
        float q[32];
        for (int j = 0; j < 32; j += LANES) {
            const F rounded = f_round(f_mul(f_load(x + i + j), f_set1(inverse)));
            f_store(q + j, f_min(f_add(rounded, f_set1(8)), f_set1(15)));
        }
        for (int j = 0; j < 16; j++) {
            y[2 + j] = (uint8_t)((int)q[j] | (int)q[j + 16] << 4);
        }
    }
}

inline void butterfly(F &a, F &b) {
    const F sum = f_add(a, b);
    b = f_sub(a, b);
    a = sum;
}
void hadamard(int64_t n, int64_t count, const float *x, float *y) {
    const F factor = f_set1(1 / __builtin_sqrtf((float)n));
    for (int64_t i = 0; i < count; i += LANES * LANES) { // within vectors: across them, once they are transposed
        const int vectors = (int)(count - i < LANES * LANES ? (count - i) / LANES : LANES);
        F t[LANES];
        for (int v = 0; v < LANES; v++) {
            t[v] = v < vectors ? f_mul(f_load(x + i + v * LANES), factor) : f_zero();
        }
        f_transpose(t);
        for (int step = 1; step < LANES; step *= 2) {
            for (int v = 0; v < LANES; v++) {
                if (!(v & step)) {
                    butterfly(t[v], t[v + step]);
                }
            }
        }
        f_transpose(t);
        for (int v = 0; v < vectors; v++) {
            f_store(y + i + v * LANES, t[v]);
        }
    }
    for (int64_t step = LANES; step < n; step *= 2) {
        for (int64_t i = 0; i < count; i += LANES) {
            if (!(i & step)) {
                F a = f_load(y + i), b = f_load(y + i + step);
                butterfly(a, b);
                f_store(y + i, a);
                f_store(y + i + step, b);
            }
        }
    }
}

void rope(int64_t n, bool halves, const float *x, const float *cosines, const float *sines, float *y) {
    const int64_t half = n / 2;
    if (!halves) {
        for (int64_t i = 0; i < half; i++) {
            const float a = x[2 * i], b = x[2 * i + 1];
            y[2 * i] = a * cosines[i] - b * sines[i];
            y[2 * i + 1] = a * sines[i] + b * cosines[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i += LANES) {
        const int rest = half - i < LANES ? (int)(half - i) : LANES;
        const F a = f_load_n(x + i, rest), b = f_load_n(x + half + i, rest);
        const F c = f_load_n(cosines + i, rest), s = f_load_n(sines + i, rest);
        f_store_n(y + i, f_sub(f_mul(a, c), f_mul(b, s)), rest);
        f_store_n(y + half + i, f_add(f_mul(a, s), f_mul(b, c)), rest);
    }
}
