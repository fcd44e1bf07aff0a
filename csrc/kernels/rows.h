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

void rms_norm(int64_t n, const float *x, float eps, float *y) {
    F sum = f_zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const F v = f_load(x + i);
        sum = f_fma(v, v, sum);
    }
    if (i < n) {
        const F v = f_load_n(x + i, (int)(n - i));
        sum = f_fma(v, v, sum);
    }
    const F factor = f_set1(1 / __builtin_sqrtf(f_reduce_add(sum) / (float)n + eps));
    each1(n, x, y, [=](F v) { return f_mul(v, factor); });
}

void add(int64_t n, const float *a, const float *b, float *y) {
    each2(n, a, b, y, [](F u, F v) { return f_add(u, v); });
}

void mul(int64_t n, const float *a, const float *b, float *y) {
    each2(n, a, b, y, [](F u, F v) { return f_mul(u, v); });
}

void scale(int64_t n, const float *x, float factor, float bias, float *y) {
    each1(n, x, y, [=](F v) { return f_fma(v, f_set1(factor), f_set1(bias)); });
}

void silu_mul(int64_t n, const float *x, const float *g, float *y) {
    each2(n, x, g, y, [](F u, F v) {
        const F one = f_set1(1), e = f_exp(f_min(f_sub(f_zero(), u), f_set1(80)));
        return f_mul(f_div(u, f_add(one, e)), v);
    });
}

// The tanh form (Hendrycks and Gimpel, arXiv 1606.08415): x/2 (1 + tanh t) = x / (1 + e^(-2t)).
void gelu_mul(int64_t n, const float *x, const float *g, float *y) {
    each2(n, x, g, y, [](F u, F v) {
        const F t = f_mul(f_mul(u, f_set1(0.79788456080286535588f)), f_fma(f_mul(u, u), f_set1(0.044715f), f_set1(1)));
        const F e = f_exp(f_min(f_mul(f_set1(-2), t), f_set1(80)));
        return f_mul(f_div(u, f_add(f_set1(1), e)), v);
    });
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
