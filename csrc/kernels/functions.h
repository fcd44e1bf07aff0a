// Functions of vectors of floats.
#pragma once

// e^x; exactly 1 at 0, exactly 0 below -87 (also at -infinity). Cody-Waite reduction, Cephes' polynomial.
inline F f_exp(F x) {
    const F n = f_round(f_mul(x, f_set1(1.44269504f)));
    F r = f_fnma(n, f_set1(0.693359375f), x);
    r = f_fnma(n, f_set1(-2.12194440e-4f), r);
    F p = f_set1(1.9875691500e-4f);
    p = f_fma(p, r, f_set1(1.3981999507e-3f));
    p = f_fma(p, r, f_set1(8.3334519073e-3f));
    p = f_fma(p, r, f_set1(4.1665795894e-2f));
    p = f_fma(p, r, f_set1(1.6666665459e-1f));
    p = f_fma(p, r, f_set1(5.0000001201e-1f));
    p = f_fma(f_mul(r, r), p, f_add(r, f_set1(1)));
    return f_zero_unless_above(x, -87.0f, f_ldexp(p, n));
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
