// Functions of vectors of floats.
#pragma once

// e^r for r = x - n ln 2, n being a whole number near x / ln 2. Cody-Waite reduction, Cephes' polynomial. Of several x at
// once, as each step waits for the one before.
template <int N> inline void f_exp_rest(const F *x, const F *n, F *p) {
    constexpr float C[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    F r[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        r[i] = f_fnma(n[i], f_set1(-2.12194440e-4f), f_fnma(n[i], f_set1(0.693359375f), x[i]));
        p[i] = f_set1(C[0]);
    }
#pragma GCC unroll 5
    for (int c = 1; c < 6; c++) {
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            p[i] = f_fma(p[i], r[i], f_set1(C[c]));
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        p[i] = f_fma(f_mul(r[i], r[i]), p[i], f_add(r[i], f_set1(1)));
    }
}
// e^x; exactly 1 at 0, exactly 0 below -87 (also at -infinity).
inline F f_exp(F x) {
    const F n = f_round(f_mul(x, f_set1(1.44269504f)));
    F p;
    f_exp_rest<1>(&x, &n, &p);
    return f_zero_unless_above(x, -87.0f, f_ldexp(p, n));
}
// The same bits for x that are not above 0: where the result is not 0 it is a normal number, so n is added to its exponent.
template <int N> inline void f_exp_below(F *x) {
    const F whole = f_set1(12582912); // 1.5 * 2^23: what is added to it ends up in its lowest bits, rounded
    F shifted[N], n[N], p[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        shifted[i] = f_add(f_mul(x[i], f_set1(1.44269504f)), whole);
        n[i] = f_sub(shifted[i], whole);
    }
    f_exp_rest<N>(x, n, p);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        x[i] = f_zero_unless_above(x[i], -87.0f, f_cast(i_add(i_cast(p[i]), i_shl32<23>(i_cast(shifted[i])))));
    }
}
inline float exp1(float x) {
    float y[LANES];
    f_store(y, f_exp(f_set1(x)));
    return y[0];
}

inline F f_neg(F x) { return f_sub(f_zero(), x); }
// e^-x, not above e^80.
inline F f_exp_neg(F x) { return f_exp(f_min(f_neg(x), f_set1(80))); }
inline F f_sigmoid(F x) { return f_div(f_set1(1), f_add(f_set1(1), f_exp_neg(x))); }
inline F f_silu(F x) { return f_div(x, f_add(f_set1(1), f_exp_neg(x))); }
inline F f_clamp(F x, float low, float high) { return f_min(f_max(x, f_set1(low)), f_set1(high)); }
// The tanh form (Hendrycks and Gimpel, arXiv 1606.08415): x/2 (1 + tanh t) = x / (1 + e^(-2t)).
inline F f_gelu(F x) {
    const F t = f_mul(f_mul(x, f_set1(0.79788456080286535588f)), f_fma(f_mul(x, x), f_set1(0.044715f), f_set1(1)));
    return f_div(x, f_add(f_set1(1), f_exp(f_min(f_mul(f_set1(-2), t), f_set1(80)))));
}
// The exact form, x/2 (1 + erf(x / sqrt 2)) = max(x, 0) - |x| erfc(|x| / sqrt 2) / 2; erfc by Abramowitz and Stegun's
// 7.1.26, which is off by 1.5e-7 at the most.
inline F f_gelu_erf(F x) {
    const F size = f_max(x, f_neg(x)), z = f_mul(size, f_set1(0.70710678f));
    const F t = f_div(f_set1(1), f_fma(z, f_set1(0.3275911f), f_set1(1)));
    F p = f_set1(1.061405429f);
    p = f_fma(p, t, f_set1(-1.453152027f));
    p = f_fma(p, t, f_set1(1.421413741f));
    p = f_fma(p, t, f_set1(-0.284496736f));
    p = f_fma(p, t, f_set1(0.254829592f));
    const F half = f_mul(f_mul(p, t), f_mul(f_set1(0.5f), f_exp(f_neg(f_mul(z, z)))));
    return f_sub(f_max(x, f_zero()), f_mul(size, half));
}
// (e - 1) / (e + 1) with e = e^2x.
inline F f_tanh(F x) {
    const F e = f_exp(f_mul(f_set1(2), f_clamp(x, -20, 20)));
    return f_div(f_sub(e, f_set1(1)), f_add(e, f_set1(1)));
}
