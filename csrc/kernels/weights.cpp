// See weights.h. Written for clarity and for the compiler's vectorizer: packing runs once for each model.
#include "blocks.h"
#include "scales.h"

#include <string.h>

namespace edgespec {
namespace {

// ---- groups: one function for each type, so that nothing is decided in the inner loops ----

inline void flip_signs(Step &step, uint8_t sign) {
    for (uint8_t &value : step.values) {
        value ^= sign;
    }
}

// The place of columns 4v.. of row `row` of 4 in paired planes: read as the other layout, what is there is columns
// 4 `place`.. of row `row`.
struct PairedPlace {
    int row, place;
    PairedPlace(int r, int v) : row(r % 2 * 2 + v % 2), place(v / 2 * 2 + r / 2) {}
};

inline void pair_rows(const Step *rows, Step *paired) {
    for (int r = 0; r < 4; r++) {
        for (int v = 0; v < 8; v++) {
            const PairedPlace to(r, v);
            memcpy(paired[to.row].values + 4 * to.place, rows[r].values + 4 * v, 4);
        }
    }
}
inline void unpair_rows(const Step *paired, Step *rows) {
    for (int r = 0; r < 4; r++) {
        for (int v = 0; v < 8; v++) {
            const PairedPlace from(r, v);
            memcpy(rows[r].values + 4 * v, paired[from.row].values + 4 * from.place, 4);
        }
    }
}

typedef void PackFn(int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst);

template <int TYPE> void pack_group_of(int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst) {
    constexpr Type type = (Type)TYPE;
    constexpr Format f = FORMATS[type];
    const int lanes = layout.lanes;
    const uint8_t flip = type == Q8_0 && !layout.signed_bytes ? 0x80 : 0;
    const int64_t packet_bytes = (int64_t)(f.header + f.steps * f.step) * lanes, stride = row_bytes(type, columns);
    const int64_t n_steps = columns / 32;
    const int steps_of_block = f.block / 32;
    memset(dst, 0, (size_t)group_bytes(type, columns, lanes));
    Step steps[MAX_LANES] = {}, paired[4]; // rows that are not there remain zeros
    for (int64_t s = 0; s < n_steps; s++) {
        uint8_t *packet = dst + s / f.steps * packet_bytes;
        const int in_packet = (int)(s % f.steps);
        for (int row = 0; row < rows; row++) {
            const uint8_t *block = src + row * stride + s / steps_of_block * f.block_bytes;
            if (s % steps_of_block == 0) {
                store_scales(type, block, in_packet, lanes, row, packet);
            }
            decode(type, block, (int)(s % steps_of_block), steps[row]);
            flip_signs(steps[row], flip);
        }
        if (layout.paired) {
            pair_rows(steps, paired);
        }
        for (int row = 0; row < (layout.paired ? 4 : rows); row++) {
            store_row(type, layout.paired ? paired[row] : steps[row], lanes,
                      packet + (int64_t)(f.header + in_packet * f.step) * lanes + 4 * row);
        }
    }
}

template <int TYPE> void unpack_group_of(int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst) {
    constexpr Type type = (Type)TYPE;
    constexpr Format f = FORMATS[type];
    const int lanes = layout.lanes;
    const uint8_t flip = type == Q8_0 && !layout.signed_bytes ? 0x80 : 0;
    const int64_t packet_bytes = (int64_t)(f.header + f.steps * f.step) * lanes, stride = row_bytes(type, columns);
    const int64_t n_steps = columns / 32;
    const int steps_of_block = f.block / 32;
    memset(dst, 0, (size_t)(rows * stride));
    Step steps[MAX_LANES], paired[4];
    for (int64_t s = 0; s < n_steps; s++) {
        const uint8_t *packet = src + s / f.steps * packet_bytes;
        const int in_packet = (int)(s % f.steps);
        for (int row = 0; row < (layout.paired ? 4 : rows); row++) {
            load_row(type, packet + (int64_t)(f.header + in_packet * f.step) * lanes + 4 * row, lanes,
                     layout.paired ? paired[row] : steps[row]);
        }
        if (layout.paired) {
            unpair_rows(paired, steps);
        }
        for (int row = 0; row < rows; row++) {
            uint8_t *block = dst + row * stride + s / steps_of_block * f.block_bytes;
            if (s % steps_of_block == 0) {
                load_scales(type, packet, in_packet, lanes, row, block);
            }
            flip_signs(steps[row], flip);
            encode(type, steps[row], (int)(s % steps_of_block), block);
        }
    }
}

// Items, columns of F16 or pairs of them, whose rows lie side by side.
template <class T> void pack_floats_of(int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst) {
    const int64_t size = sizeof(T), items = columns * 2 / size, lanes = layout.lanes;
    memset(dst, 0, (size_t)(items * lanes * size));
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < items; i++) {
            memcpy(dst + (i * lanes + row) * size, src + (row * items + i) * size, sizeof(T));
        }
    }
}

template <class T> void unpack_floats_of(int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst) {
    const int64_t size = sizeof(T), items = columns * 2 / size, lanes = layout.lanes;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = 0; i < items; i++) {
            memcpy(dst + (row * items + i) * size, src + (i * lanes + row) * size, sizeof(T));
        }
    }
}

} // namespace

Type find_type(int ggml_type) {
    int type = 0;
    while (type < N_TYPES && FORMATS[type].ggml_type != ggml_type) {
        type++;
    }
    return (Type)type;
}

#define EACH_TYPE(FUNCTION, FLOATS_FUNCTION)                                                                          \
    {                                                                                                                 \
        FUNCTION<Q4_0>, FUNCTION<Q4_1>, FUNCTION<Q5_0>, FUNCTION<Q5_1>, FUNCTION<Q8_0>, FUNCTION<IQ4_NL>,             \
            FUNCTION<MXFP4>, FUNCTION<NVFP4>, FUNCTION<Q1_0>, FUNCTION<Q2_0>, FUNCTION<Q2_K>, FUNCTION<Q3_K>, FUNCTION<Q4_K>, FUNCTION<Q5_K>,         \
            FUNCTION<Q6_K>, FUNCTION<IQ4_XS>, FUNCTION<TQ1_0>, FUNCTION<TQ2_0>, FUNCTION<IQ1_S>, FUNCTION<IQ1_M>,     \
            FUNCTION<IQ2_XXS>, FUNCTION<IQ2_XS>, FUNCTION<IQ2_S>, FUNCTION<IQ3_XXS>, FUNCTION<IQ3_S>,                 \
            FLOATS_FUNCTION<uint16_t>, FLOATS_FUNCTION<uint32_t>                                                      \
    }

void pack_group(Type type, int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst) {
    static constexpr PackFn *functions[N_TYPES] = EACH_TYPE(pack_group_of, pack_floats_of);
    functions[type](columns, layout, rows, src, dst);
}

void unpack_group(Type type, int64_t columns, Layout layout, int rows, const uint8_t *src, uint8_t *dst) {
    static constexpr PackFn *functions[N_TYPES] = EACH_TYPE(unpack_group_of, unpack_floats_of);
    functions[type](columns, layout, rows, src, dst);
}

} // namespace edgespec
