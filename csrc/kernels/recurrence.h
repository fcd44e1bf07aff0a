// Layers whose memory is a state: a row of it stays in registers while all tokens of the pass go by.
//
// No row meets another, and none another token but through its own state: the tokens beside one change nothing.
#pragma once

template <int V> inline float reduce(const F *x) {
    F sum = x[0];
    for (int v = 1; v < V; v++) {
        sum = f_add(sum, x[v]);
    }
    return f_reduce_add(sum);
}

// As many rows at once as the registers hold: the sums of one wait for each other.
constexpr int rows_at_once(int vectors) { return vectors * 2 <= (LANES == 8 ? 8 : 16) ? 2 : 1; }
constexpr int PARTS = 4; // of a sum, added at the end

// ROWS rows from `row` on: s = decay s; d = beta (v - s.k); s += d k; y = scale s.q (Yang et al., arXiv 2412.06464).
template <int V, int ROWS> void rows_of(const DeltaNet &net, int64_t row) {
    constexpr int SUMS = V < PARTS ? V : PARTS;
    F s[ROWS][V];
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < V; v++) {
            s[r][v] = f_load(net.state + (row + r) * net.width + v * LANES);
        }
    }
    for (int64_t t = 0; t < net.tokens; t++) {
        const float *const k = net.k + t * net.k_stride, *const q = net.q + t * net.q_stride;
        const float *const decay = net.decay + t * (net.by_column ? net.width : 1);
        const int64_t slot = net.tokens - 1 - t;
        F sums[ROWS][SUMS];
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 32
            for (int v = 0; v < V; v++) {
                s[r][v] = f_mul(s[r][v], net.by_column ? f_load(decay + v * LANES) : f_set1(*decay));
                const F product = f_mul(s[r][v], f_load(k + v * LANES));
                sums[r][v % SUMS] = v < SUMS ? product : f_add(sums[r][v % SUMS], product);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            const float before = reduce<SUMS>(sums[r]), value = net.v[t * net.v_stride + row + r];
            const F delta = f_set1((value - before) * net.beta[t * net.beta_stride]);
#pragma GCC unroll 32
            for (int v = 0; v < V; v++) {
                s[r][v] = f_fma(delta, f_load(k + v * LANES), s[r][v]);
                const F product = f_mul(s[r][v], f_load(q + v * LANES));
                sums[r][v % SUMS] = v < SUMS ? product : f_add(sums[r][v % SUMS], product);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            net.y[t * net.y_stride + row + r] = reduce<SUMS>(sums[r]) * net.scale;
            for (int v = 0; slot < net.slots && v < V; v++) {
                f_store(net.states + slot * net.slot_stride + (row + r) * net.width + v * LANES, s[r][v]);
            }
        }
    }
}

// s = decay s + x b; y = s.c (Dao and Gu, arXiv 2405.21060).
template <int V, int ROWS> void rows_of(const StateScan &scan, int64_t row) {
    constexpr int SUMS = V < PARTS ? V : PARTS;
    F s[ROWS][V];
    for (int r = 0; r < ROWS; r++) {
        for (int v = 0; v < V; v++) {
            s[r][v] = f_load(scan.state + (row + r) * scan.width + v * LANES);
        }
    }
    for (int64_t t = 0; t < scan.tokens; t++) {
        const float *const b = scan.b + t * scan.b_stride, *const c = scan.c + t * scan.c_stride;
        const F decay = f_set1(scan.decay[t]);
        const int64_t slot = scan.tokens - 1 - t;
        F sums[ROWS][SUMS];
        for (int r = 0; r < ROWS; r++) {
            const F x = f_set1(scan.x[t * scan.x_stride + row + r] * scan.step[t]);
#pragma GCC unroll 32
            for (int v = 0; v < V; v++) {
                s[r][v] = f_add(f_mul(s[r][v], decay), f_mul(f_load(b + v * LANES), x));
                const F product = f_mul(s[r][v], f_load(c + v * LANES));
                sums[r][v % SUMS] = v < SUMS ? product : f_add(sums[r][v % SUMS], product);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            scan.y[t * scan.y_stride + row + r] = reduce<SUMS>(sums[r]);
            for (int v = 0; slot < scan.slots && v < V; v++) {
                f_store(scan.states + slot * scan.slot_stride + (row + r) * scan.width + v * LANES, s[r][v]);
            }
        }
    }
}

template <int V, class Layer> void each_row(const Layer &layer, int64_t row, int64_t last) {
    for (; row + rows_at_once(V) <= last; row += rows_at_once(V)) {
        rows_of<V, rows_at_once(V)>(layer, row);
    }
    for (; row < last; row++) {
        rows_of<V, 1>(layer, row);
    }
}

void delta_net(const DeltaNet &net, int64_t first, int64_t last) {
    switch (net.width) {
    case 16: return each_row<16 / LANES>(net, first, last);
    case 32: return each_row<32 / LANES>(net, first, last);
    case 64: return each_row<64 / LANES>(net, first, last);
    default: return each_row<128 / LANES>(net, first, last);
    }
}

void state_scan(const StateScan &scan, int64_t first, int64_t last) {
    switch (scan.width) {
    case 16: return each_row<16 / LANES>(scan, first, last);
    case 32: return each_row<32 / LANES>(scan, first, last);
    case 64: return each_row<64 / LANES>(scan, first, last);
    case 128: return each_row<128 / LANES>(scan, first, last);
    default: return each_row<256 / LANES>(scan, first, last);
    }
}
