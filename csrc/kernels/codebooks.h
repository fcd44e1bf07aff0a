// Types whose weights are entries of a table of ggml's: IQ1, IQ2 and IQ3. Packed, each weight has its own 3 or 4 bits, so
// that no kernel looks entries up; the table is only needed to pack and unpack, and is ggml's own.
//
// An entry is the magnitudes of 8 columns, or of 4 (IQ3), as *levels*; a bit for each column is its sign. IQ1 has
// entries of -1, 0 and 1, and bits that say whether an eighth is added to 8 columns or taken away.
#pragma once

#include "weights.h"

#include <string.h>

namespace edgespec {

struct Codebook {
    static constexpr int ENTRIES = 2048, KEYS = 6561; // 3 levels of 8 columns; 8 levels of 4 are fewer
    bool is_known;
    uint8_t levels[ENTRIES][8];
    uint16_t index_of[KEYS]; // by the levels, as digits of a number

    int key(const uint8_t *of_columns, int columns) const {
        int number = 0;
        for (int i = 0; i < columns; i++) {
            number = number * (columns == 4 ? 8 : 3) + of_columns[i];
        }
        return number < KEYS ? number : 0; // else of no weights at all
    }
};

constexpr bool is_iq1(Type type) { return type == IQ1_S || type == IQ1_M; }
constexpr bool is_iq2(Type type) { return type == IQ2_XXS || type == IQ2_XS || type == IQ2_S; }
constexpr bool is_iq3(Type type) { return type == IQ3_XXS || type == IQ3_S; }
constexpr bool is_coded(Type type) { return is_iq1(type) || is_iq2(type) || is_iq3(type); }

// That of a coded type, learned from the ggml in this process on first use; unknown if there is none.
const Codebook &codebook(Type type);

// What a block says of 32 columns: the entries of each 8 (IQ3: 4), their signs, and one or two scales.
struct CodedStep {
    uint16_t index[8];
    uint8_t signs[4], scales[2];
};

namespace {

inline uint32_t load16(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8; }
inline uint32_t load32(const uint8_t *p) { return load16(p) | load16(p + 2) << 16; }
inline void add32(uint8_t *p, uint32_t bits) {
    for (int i = 0; i < 4; i++) {
        p[i] |= (uint8_t)(bits >> 8 * i);
    }
}
// The eighth sign makes the number of negative ones even.
inline uint8_t with_parity(uint32_t seven) { return (uint8_t)(seven | (uint32_t)__builtin_parity(seven) << 7); }

inline CodedStep read_step(Type type, const uint8_t *block, int s) {
    CodedStep step = {};
    const uint32_t word = type == IQ2_XXS ? load32(block + 6 + 8 * s) : type == IQ3_XXS ? load32(block + 66 + 4 * s) : 0;
    const uint32_t scales = type == IQ2_XXS || type == IQ3_XXS ? word >> 28
                            : type == IQ2_XS                   ? block[66 + s]
                            : type == IQ2_S                    ? block[74 + s]
                            : type == IQ3_S                    ? block[106 + s / 2] >> s % 2 * 4
                            : type == IQ1_S                    ? load16(block + 34 + 2 * s) >> 12 & 7
                                                               : load16(block + 48 + s / 2 * 2) >> s % 2 * 6;
    step.scales[0] = scales & (type == IQ1_M ? 7 : 15);
    step.scales[1] = type == IQ1_M ? scales >> 3 & 7 : scales >> 4 & 15;
    for (int l = 0; l < 4; l++) {
        const int four = 4 * s + l;
        const uint32_t high = block[32 + 2 * s + l / 2] >> l % 2 * 4, both = load16(block + 2 + 2 * four); // IQ1_M; IQ2_XS
        switch (type) {
        case IQ2_XXS:
        case IQ3_XXS:
            step.signs[l] = with_parity(word >> 7 * l & 127);
            step.index[l] = block[2 + 8 * s + l];
            break;
        case IQ2_XS:
            step.signs[l] = with_parity(both >> 9);
            step.index[l] = both & 511;
            break;
        case IQ2_S:
            step.signs[l] = block[34 + four];
            step.index[l] = (uint16_t)(block[2 + four] | (block[66 + s] >> 2 * l & 3) << 8);
            break;
        case IQ3_S:
            step.signs[l] = block[74 + four];
            break;
        case IQ1_S:
            step.signs[l] = load16(block + 34 + 2 * s) >> 15 ? 255 : 0;
            step.index[l] = (uint16_t)(block[2 + four] | (load16(block + 34 + 2 * s) >> 3 * l & 7) << 8);
            break;
        default:
            step.signs[l] = high & 8 ? 255 : 0;
            step.index[l] = (uint16_t)(block[four] | (high & 7) << 8);
        }
    }
    for (int j = 0; is_iq3(type) && j < 8; j++) {
        const int high = type == IQ3_S ? block[66 + s] >> j & 1 : 0;
        step.index[j] = (uint16_t)(block[2 + 8 * s + j] | high << 8);
    }
    return step;
}

// The inverse, added to what other steps have written.
inline void add_step(Type type, const CodedStep &step, int s, uint8_t *block) {
    const uint32_t scales = step.scales[0] | (uint32_t)step.scales[1] << (type == IQ1_M ? 3 : 4);
    if (type == IQ2_XS || type == IQ2_S) {
        block[type == IQ2_XS ? 66 + s : 74 + s] |= (uint8_t)scales;
    } else if (type == IQ3_S) {
        block[106 + s / 2] |= (uint8_t)(step.scales[0] << s % 2 * 4);
    } else if (type == IQ1_S) {
        block[35 + 2 * s] |= (uint8_t)(step.scales[0] << 4 | (step.signs[0] & 128));
    } else if (type == IQ1_M) {
        block[48 + s / 2 * 2] |= (uint8_t)(scales << s % 2 * 6);
        block[49 + s / 2 * 2] |= (uint8_t)(scales << s % 2 * 6 >> 8);
    } else {
        add32(block + (type == IQ2_XXS ? 6 + 8 * s : 66 + 4 * s), (uint32_t)step.scales[0] << 28);
    }
    for (int l = 0; l < 4; l++) {
        const int four = 4 * s + l;
        const uint32_t seven = step.signs[l] & 127, index = step.index[l];
        switch (type) {
        case IQ2_XXS:
            block[2 + 8 * s + l] |= (uint8_t)index;
            add32(block + 6 + 8 * s, seven << 7 * l);
            break;
        case IQ3_XXS:
            add32(block + 66 + 4 * s, seven << 7 * l);
            break;
        case IQ2_XS:
            block[2 + 2 * four] |= (uint8_t)index;
            block[3 + 2 * four] |= (uint8_t)(index >> 8 | seven << 1);
            break;
        case IQ2_S:
            block[2 + four] |= (uint8_t)index;
            block[34 + four] |= step.signs[l];
            block[66 + s] |= (uint8_t)(index >> 8 << 2 * l);
            break;
        case IQ3_S:
            block[74 + four] |= step.signs[l];
            break;
        case IQ1_S:
            block[2 + four] |= (uint8_t)index;
            block[34 + 2 * s] |= (uint8_t)(index >> 8 << 3 * l);
            block[35 + 2 * s] |= (uint8_t)(index >> 8 << 3 * l >> 8);
            break;
        default:
            block[four] |= (uint8_t)index;
            block[32 + 2 * s + l / 2] |= (uint8_t)((index >> 8 | (step.signs[l] & 8u)) << l % 2 * 4);
        }
    }
    for (int j = 0; is_iq3(type) && j < 8; j++) {
        block[2 + 8 * s + j] |= (uint8_t)step.index[j];
        if (type == IQ3_S) {
            block[66 + s] |= (uint8_t)(step.index[j] >> 8 << j);
        }
    }
}

// The codes of 32 columns: IQ3_S the weight itself, (w + 15) / 2; IQ1 twice the level and the bit; the others the level
// and, above it, the sign.
inline void decode_coded(Type type, const uint8_t *block, int s, uint8_t *v) {
    const Codebook &book = codebook(type);
    const CodedStep step = read_step(type, block, s);
    for (int i = 0; i < 32; i++) {
        const uint8_t *entry = book.levels[step.index[is_iq3(type) ? i / 4 : i / 8]];
        const int level = entry[is_iq3(type) ? i % 4 : i % 8], sign = step.signs[i / 8] >> i % 8 & 1;
        v[i] = (uint8_t)(type == IQ3_S  ? sign ? 7 - level : 8 + level
                         : is_iq1(type) ? 2 * level + sign
                                        : level + sign * (type == IQ3_XXS ? 8 : 4));
    }
}
inline void encode_coded(Type type, const uint8_t *v, int s, uint8_t *block) {
    const Codebook &book = codebook(type);
    CodedStep step = {};
    uint8_t levels[32];
    for (int i = 0; i < 32; i++) {
        const int sign = type == IQ3_S ? v[i] < 8 : is_iq1(type) ? v[i] & 1 : v[i] / (type == IQ3_XXS ? 8 : 4);
        step.signs[i / 8] |= (uint8_t)(sign << i % 8);
        levels[i] = (uint8_t)(type == IQ3_S  ? sign ? 7 - v[i] : v[i] - 8
                              : is_iq1(type) ? v[i] / 2
                                             : v[i] % (type == IQ3_XXS ? 8 : 4));
    }
    const int columns = is_iq3(type) ? 4 : 8;
    for (int i = 0; i < 32 / columns; i++) {
        step.index[i] = book.index_of[book.key(levels + columns * i, columns)];
    }
    add_step(type, step, s, block);
}

// A scale as the kernels use it, 2 s + 1: that of a step, or of a half of it where it has two.
inline uint8_t coded_scale(Type type, const uint8_t *block, int s, int half) {
    return (uint8_t)(2 * read_step(type, block, s).scales[half] + 1);
}
inline void add_coded_scale(Type type, uint8_t scale, int s, int half, uint8_t *block) {
    CodedStep step = {};
    step.scales[half] = scale / 2 & 15;
    add_step(type, step, s, block);
}

} // namespace
} // namespace edgespec
