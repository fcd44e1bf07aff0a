// Products of a wide tile of tokens with one group of packed weights, by tile registers: the same bits as matmul.h, as sums
// are whole numbers and what follows them is done in the same order. Compiled once for each instruction set that has them.
#include "simd.h"

namespace edgespec {
namespace {

#include "loading.h"
#include "tiles.h"

constexpr int BLOCK = LEAST_WIDE; // tokens of a tile register
constexpr int PLANE = 4 * LANES;  // bytes of 4 columns of weights
typedef int32_t Sums[BLOCK][LANES];

// The first token of a block. The last block begins earlier, rather than have fewer: what it repeats is ignored.
inline int block_begin(int block, int nc) { return BLOCK * (block + 1) <= nc ? BLOCK * block : nc - BLOCK; }
inline I sums_of(const Sums *sums, int block, int nc, int c) { return i_load(sums[block][c - block_begin(block, nc)]); }

// f(c, block) for all tokens of blocks [first, last).
template <class Function> inline void each_token(int first, int last, int nc, const Function &f) {
    for (int c = BLOCK * first; c < nc && c < BLOCK * last; c++) {
        f(c, c / BLOCK - first);
    }
}

// Values that are loaded without a sign stand for OFFSET less.
template <class W> constexpr bool FLIPS = W::BYTES && SIGNED_BYTES;
template <class W> constexpr int OFFSET = FLIPS<W> ? 128 : W::OFFSET;
template <class W> inline void load_unsigned(const uint8_t *step, I *v) {
    W::load(step, v);
    for (int i = 0; FLIPS<W> && i < 8; i++) {
        v[i] = i_xor(v[i], i_bytes(128));
    }
}

// ---- simple types ----

// Sums of all blocks from FIRST on with the weights in tile register 6.
template <int FIRST = 0> inline void simple_sums(Tiles &tiles, const int8_t *acts, int nc, Sums *sums) {
    if constexpr (FIRST < WIDE_TILE / BLOCK) {
        if (BLOCK * FIRST < nc) {
            tiles.zero<FIRST>();
            tiles.load<4>(acts + 64 * block_begin(FIRST, nc), 64);
            tiles.multiply<FIRST, 4, 6, true>();
            tiles.store<FIRST>(sums[FIRST], sizeof sums[0][0]);
            simple_sums<FIRST + 1>(tiles, acts, nc, sums);
        }
    }
}

// As simple_packet of matmul.h.
template <int TYPE> void wide_packet(Tiles &tiles, const uint8_t *header, const int8_t *acts, int nc, F *total) {
    typedef Weights<TYPE> W;
    constexpr int PARTS = W::HALVES ? 2 : 1;
    alignas(64) uint8_t planes[8 * PLANE];
    alignas(64) Sums sums[WIDE_TILE / BLOCK];
    for (int s = 0; s < W::STEPS; s++) {
        I v[8];
        load_unsigned<W>(header + W::HEADER + s * W::STEP, v);
        for (int i = 0; i < 8; i++) {
            i_store(planes + i * PLANE, i_sub8(v[i], i_bytes(OFFSET<W>)));
        }
        const int8_t *const numbers = wide_numbers(acts, nc, s);
        const F min = W::PLUS_MIN ? W::minimum(header, s) : f_zero();
        for (int part = 0; part < PARTS; part++) {
            const F scale = W::scale(header, s, part);
            tiles.load<6>(planes + part * 4 * PLANE, PLANE);
            simple_sums(tiles, wide_bytes(acts, nc, s) + 16 * part, nc, sums);
            each_token(0, WIDE_TILE / BLOCK, nc, [&](int c, int block) {
                const F scaled = f_mul(f_int(sums_of(sums, block, nc, c)), scale);
                total[c] = f_fma(scaled, f_set1(float_at(numbers, c)), total[c]);
                if (W::PLUS_MIN) {
                    total[c] = f_fnma(min, f_set1(float_at(numbers, 2 * nc + c)), total[c]);
                }
            });
        }
    }
}

// ---- K types ----

// A packet's weights times their small scales, 16 bits each: the low bytes, without a sign, then the high ones.
template <class W> inline void put_products(const uint8_t *header, uint8_t *planes) {
    const I low = i_set1(0x00FF00FF), high = i_set1((int32_t)0xFF00FF00), offset = i_set1(OFFSET<W> << 16 | OFFSET<W>);
    for (int s = 0; s < W::STEPS; s++) {
        I v[8], scales[2] = {i_set1(1), i_set1(1)};
        load_unsigned<W>(header + W::HEADER + s * W::STEP, v);
        if (!W::TERNARY) {
            W::scales(header, s, scales);
        }
        for (int i = 0; i < 8; i++, planes += PLANE) {
            const I one = scales[W::HALVES ? i / 4 : 0], scale = i_or_and(i_shl32<16>(one), one, i_set1(0xFFFF));
            const I less = i_mul16(scale, offset);
            const I even = i_sub16(i_mul16(i_and(v[i], low), scale), less), odd = i_sub16(i_mul16(i_shr16<8>(v[i]), scale), less);
            i_store(planes, i_or_and(i_shl16<8>(odd), even, low));
            i_store(planes + 64 * PLANE, i_or_and(i_shr16<8>(even), odd, high));
        }
    }
}

// As k_packet of matmul.h.
template <int TYPE> void wide_k_packet(Tiles &tiles, const uint8_t *header, const int8_t *acts, int nc, F *total) {
    typedef Weights<TYPE> W;
    constexpr int PARTS = W::HALVES ? 2 : 1;
    alignas(64) uint8_t planes[2 * 64 * PLANE];
    alignas(64) Sums low[2], high[2];
    put_products<W>(header, planes);
    I pairs[4 * PARTS];
    for (int i = 0; W::MINUS_MIN && i < 4 * PARTS; i++) {
        pairs[i] = W::pairs(header, i);
    }
    const F d = W::packet_scale(header), dmin = W::MINUS_MIN ? W::packet_minimum(header) : f_zero();
    for (int first = 0; BLOCK * first < nc; first += 2) {
        const bool two = BLOCK * (first + 1) < nc;
        tiles.zero<0>();
        tiles.zero<1>();
        tiles.zero<2>();
        tiles.zero<3>();
        for (int i = 0; i < 4; i++) {
            const int8_t *const bytes = wide_bytes(acts, nc, 2 * i);
            tiles.load<6>(planes + 16 * i * PLANE, PLANE);
            tiles.load<7>(planes + (64 + 16 * i) * PLANE, PLANE);
            tiles.load<4>(bytes + 64 * block_begin(first, nc), 64);
            tiles.multiply<0, 4, 6, false>();
            tiles.multiply<1, 4, 7, true>();
            if (two) {
                tiles.load<5>(bytes + 64 * block_begin(first + 1, nc), 64);
                tiles.multiply<2, 5, 6, false>();
                tiles.multiply<3, 5, 7, true>();
            }
        }
        tiles.store<0>(low[0], PLANE);
        tiles.store<1>(high[0], PLANE);
        if (two) {
            tiles.store<2>(low[1], PLANE);
            tiles.store<3>(high[1], PLANE);
        }
        each_token(first, first + 2, nc, [&](int c, int block) {
            const int row = c - block_begin(first + block, nc);
            const I sum = i_add(i_load(low[block][row]), i_shl32<8>(i_load(high[block][row])));
            F x = f_mul(f_int(sum), d);
            if (W::MINUS_MIN) {
                I of_pairs = i_zero();
                for (int i = 0; i < 4 * PARTS; i++) {
                    const int step = W::HALVES ? i / 2 * 2 + 1 : 2 * i; // whose numbers have them: see isa.h
                    of_pairs = i_dot_pairs(of_pairs, pairs[i], int_at(wide_numbers(acts, nc, step), (W::HALVES && i % 2 ? 0 : 3 * nc) + c));
                }
                x = f_fma(f_int(of_pairs), dmin, x);
            }
            total[c] = f_fma(x, f_set1(float_at(wide_numbers(acts, nc, 0), c)), total[c]);
        });
    }
}

template <int TYPE>
void wide_matmul(const uint8_t *group, int64_t packets, const int8_t *acts, int nc, float *const *y, int64_t first, int rows,
                 int64_t ahead) {
    typedef Weights<TYPE> W;
    static constexpr TileConfig CONFIG(BLOCK, LANES, W::K_TYPE ? 64 : W::HALVES ? 16 : 32);
    constexpr int PACKET = W::HEADER + W::STEPS * W::STEP;
    F total[WIDE_TILE];
    for (int c = 0; c < nc; c++) {
        total[c] = f_zero();
    }
    Tiles tiles(CONFIG);
    for (int64_t p = 0; p < packets; p++) {
        prefetch<2>(group + ahead, PACKET);
        if constexpr (W::K_TYPE) {
            wide_k_packet<TYPE>(tiles, group, acts, nc, total);
        } else {
            wide_packet<TYPE>(tiles, group, acts, nc, total);
        }
        group += PACKET;
        acts += W::STEPS * record_bytes(BYTES_32, nc);
    }
    tiles.release();
    for (int c = 0; c < nc; c++) {
        f_store_n(y[c] + first, total[c], rows);
    }
}

} // namespace

extern const WideTable ES_WIDE(ES_ISA_WIDE);
const WideTable ES_WIDE(ES_ISA_WIDE) = {{
    wide_matmul<Q4_0>, wide_matmul<Q4_1>, wide_matmul<Q5_0>, wide_matmul<Q5_1>, wide_matmul<Q8_0>, wide_matmul<IQ4_NL>,
    wide_matmul<MXFP4>, wide_matmul<NVFP4>, wide_matmul<Q1_0>, wide_matmul<Q2_0>, wide_matmul<Q2_K>, wide_matmul<Q3_K>,
    wide_matmul<Q4_K>, wide_matmul<Q5_K>, wide_matmul<Q6_K>, wide_matmul<IQ4_XS>, wide_matmul<TQ1_0>, wide_matmul<TQ2_0>,
    wide_matmul<IQ1_S>, wide_matmul<IQ1_M>, wide_matmul<IQ2_XXS>, wide_matmul<IQ2_XS>, wide_matmul<IQ2_S>,
    wide_matmul<IQ3_XXS>, wide_matmul<IQ3_S>, nullptr, nullptr,
}};

} // namespace edgespec
