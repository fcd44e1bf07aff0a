// Of ggml's blocks: the values of 32 columns, and where they lie in a packet (weights.h draws it). For weights.cpp
// alone.
#pragma once

#include "codebooks.h"

#include <string.h>

namespace edgespec {
namespace {

struct Step {
    uint8_t values[32]; // as stored
};

// ---- ggml's blocks <-> 32 values ----

// Where the 5-bit types keep the quants: bytes of a 32-block before the high bits and the nibbles.
int quants_offset(Type type) { return type == Q4_1 || type == Q5_1 ? 4 : type == MXFP4 ? 1 : 2; }

void decode_nibbles(const uint8_t *qs, uint8_t *v) {
    for (int i = 0; i < 16; i++) {
        v[i] = qs[i] & 15;
        v[i + 16] = qs[i] >> 4;
    }
}
void encode_nibbles(const uint8_t *v, uint8_t *qs) {
    for (int i = 0; i < 16; i++) {
        qs[i] = (uint8_t)((v[i] & 15) | (v[i + 16] & 15) << 4);
    }
}

// TQ1_0: a byte is a fraction of 256, rounded up, whose first five ternary digits are five columns, 32 or 16 or, in the
// last four bytes, 4 columns apart; these have four digits.
struct Digit {
    int byte, shift; // 3 to the power of the digit's place, 0 being the first
    explicit Digit(int column) {
        const int place = column < 160 ? column / 32 : column < 240 ? (column - 160) / 16 : (column - 240) / 4;
        byte = column < 160 ? column % 32 : column < 240 ? 32 + column % 16 : 48 + column % 4;
        constexpr int POWERS[5] = {1, 3, 9, 27, 81};
        shift = POWERS[place];
    }
};

inline void decode(Type type, const uint8_t *block, int s, Step &step) {
    uint8_t *v = step.values;
    if (is_coded(type)) {
        decode_coded(type, block, s, v);
        return;
    }
    switch (type) {
    case Q4_0:
    case Q4_1:
    case IQ4_NL:
    case MXFP4:
        decode_nibbles(block + quants_offset(type), v);
        return;
    case Q5_0:
    case Q5_1: {
        uint32_t high;
        memcpy(&high, block + quants_offset(type), 4);
        decode_nibbles(block + quants_offset(type) + 4, v);
        for (int i = 0; i < 32; i++) {
            v[i] |= (uint8_t)((high >> i & 1) << 4);
        }
        return;
    }
    case Q8_0:
        for (int i = 0; i < 32; i++) {
            v[i] = block[2 + i];
        }
        return;
    case Q1_0:
        for (int i = 0; i < 32; i++) {
            v[i] = block[2 + 4 * s + i / 8] >> i % 8 & 1;
        }
        return;
    case Q2_0:
        for (int i = 0; i < 32; i++) {
            v[i] = block[2 + 8 * s + i / 4] >> i % 4 * 2 & 3;
        }
        return;
    case NVFP4: // as 16 columns have a scale, so have they bytes
        for (int i = 0; i < 32; i++) {
            const uint8_t both = block[4 + 16 * s + i / 16 * 8 + i % 8];
            v[i] = i / 8 % 2 ? both >> 4 : both & 15;
        }
        return;
    case IQ4_XS:
        decode_nibbles(block + 8 + 16 * s, v);
        return;
    case Q2_K:
    case TQ2_0: { // four steps in 32 bytes
        const uint8_t *qs = block + (type == Q2_K ? 16 : 0) + s / 4 * 32;
        for (int i = 0; i < 32; i++) {
            v[i] = qs[i] >> s % 4 * 2 & 3;
        }
        return;
    }
    case TQ1_0:
        for (int i = 0; i < 32; i++) {
            const Digit digit(32 * s + i);
            const uint8_t rest = (uint8_t)(block[digit.byte] * digit.shift);
            v[i] = (uint8_t)(rest * 3 >> 8);
        }
        return;
    case Q3_K: { // 32 bytes with the high bits of all steps, one in each bit; then low bits: four steps in 32 bytes
        const uint8_t *qs = block + 32 + s / 4 * 32;
        for (int i = 0; i < 32; i++) {
            v[i] = (uint8_t)((qs[i] >> s % 4 * 2 & 3) | (block[i] >> s & 1) << 2);
        }
        return;
    }
    case Q4_K:
    case Q5_K: { // 32 bytes hold two steps: one in the low, one in the high nibbles
        const uint8_t *qs = block + (type == Q4_K ? 16 : 48) + s / 2 * 32;
        for (int i = 0; i < 32; i++) {
            v[i] = s % 2 ? qs[i] >> 4 : qs[i] & 15;
        }
        if (type == Q5_K) {
            for (int i = 0; i < 32; i++) {
                v[i] |= (uint8_t)((block[16 + i] >> s & 1) << 4);
            }
        }
        return;
    }
    default: { // Q6_K: two halves of 128 columns; low 4 bits of 32 columns, then 2 high bits of four steps in a byte
        const uint8_t *low = block + s / 4 * 64 + s % 2 * 32, *high = block + 128 + s / 4 * 32;
        for (int i = 0; i < 32; i++) {
            v[i] = (uint8_t)((s % 4 < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> s % 4 * 2 & 3) << 4);
        }
    }
    }
}

// The inverse; `block` is all zeros before the first step.
inline void encode(Type type, const Step &step, int s, uint8_t *block) {
    const uint8_t *v = step.values;
    if (is_coded(type)) {
        encode_coded(type, v, s, block);
        return;
    }
    switch (type) {
    case Q4_0:
    case Q4_1:
    case IQ4_NL:
    case MXFP4:
        encode_nibbles(v, block + quants_offset(type));
        return;
    case Q5_0:
    case Q5_1: {
        uint32_t high = 0;
        for (int i = 0; i < 32; i++) {
            high |= (uint32_t)(v[i] >> 4) << i;
        }
        memcpy(block + quants_offset(type), &high, 4);
        encode_nibbles(v, block + quants_offset(type) + 4);
        return;
    }
    case Q8_0:
        for (int i = 0; i < 32; i++) {
            block[2 + i] = v[i];
        }
        return;
    case Q1_0:
        for (int i = 0; i < 32; i++) {
            block[2 + 4 * s + i / 8] |= (uint8_t)((v[i] & 1) << i % 8);
        }
        return;
    case Q2_0:
        for (int i = 0; i < 32; i++) {
            block[2 + 8 * s + i / 4] |= (uint8_t)((v[i] & 3) << i % 4 * 2);
        }
        return;
    case NVFP4:
        for (int i = 0; i < 32; i++) {
            block[4 + 16 * s + i / 16 * 8 + i % 8] |= (uint8_t)((v[i] & 15) << i / 8 % 2 * 4);
        }
        return;
    case IQ4_XS:
        encode_nibbles(v, block + 8 + 16 * s);
        return;
    case Q2_K:
    case TQ2_0: {
        uint8_t *qs = block + (type == Q2_K ? 16 : 0) + s / 4 * 32;
        for (int i = 0; i < 32; i++) {
            qs[i] |= (uint8_t)((v[i] & 3) << s % 4 * 2);
        }
        return;
    }
    case TQ1_0:
        for (int i = 0; i < 32; i++) {
            const Digit digit(32 * s + i);
            block[digit.byte] = (uint8_t)(block[digit.byte] + v[i] * (81 / digit.shift));
        }
        for (int i = 0; s == 7 && i < 52; i++) { // all digits are there
            block[i] = (uint8_t)((block[i] * 256 + 242) / 243);
        }
        return;
    case Q3_K: {
        uint8_t *qs = block + 32 + s / 4 * 32;
        for (int i = 0; i < 32; i++) {
            qs[i] |= (uint8_t)((v[i] & 3) << s % 4 * 2);
            block[i] |= (uint8_t)(v[i] >> 2 << s);
        }
        return;
    }
    case Q4_K:
    case Q5_K: {
        uint8_t *qs = block + (type == Q4_K ? 16 : 48) + s / 2 * 32;
        for (int i = 0; i < 32; i++) {
            qs[i] |= (uint8_t)((v[i] & 15) << s % 2 * 4);
        }
        if (type == Q5_K) {
            for (int i = 0; i < 32; i++) {
                block[16 + i] |= (uint8_t)(v[i] >> 4 << s);
            }
        }
        return;
    }
    default: {
        uint8_t *low = block + s / 4 * 64 + s % 2 * 32, *high = block + 128 + s / 4 * 32;
        for (int i = 0; i < 32; i++) {
            low[i] |= (uint8_t)((v[i] & 15) << s % 4 / 2 * 4);
            high[i] |= (uint8_t)(v[i] >> 4 << s % 4 * 2);
        }
    }
    }
}

// ---- 32 values <-> the planes of one row ----

void put4(uint8_t *plane, int lanes, int v, const uint8_t *four) { memcpy(plane + (size_t)v * lanes * 4, four, 4); }
void get4(const uint8_t *plane, int lanes, int v, uint8_t *four) { memcpy(four, plane + (size_t)v * lanes * 4, 4); }

inline void store_row(Type type, const Step &step, int lanes, uint8_t *p) {
    const uint8_t *v = step.values;
    if (type == Q8_0) {
        for (int i = 0; i < 8; i++) {
            put4(p, lanes, i, v + 4 * i);
        }
        return;
    }
    if (FORMATS[type].step == 12) {
        uint8_t bytes[12];
        for (int i = 0; i < 12; i++) {
            const uint8_t rest = i < 8 ? v[24 + i] & 3 : (uint8_t)(v[16 + i] >> 2 | v[20 + i] >> 2 << 1);
            bytes[i] = (uint8_t)(v[i] | v[12 + i] << 3 | rest << 6);
        }
        for (int i = 0; i < 3; i++) {
            put4(p, lanes, i, bytes + 4 * i);
        }
        return;
    }
    uint8_t nibbles[16], planes[8] = {0};
    if (FORMATS[type].step == 4) {
        for (int i = 0; i < 32; i++) {
            planes[i % 4] |= (uint8_t)((v[i] & 1) << i / 4);
        }
        put4(p, lanes, 0, planes);
        return;
    }
    if (FORMATS[type].step == 8) {
        for (int i = 0; i < 32; i++) {
            planes[i / 16 * 4 + i % 4] |= (uint8_t)((v[i] & 3) << i % 16 / 4 * 2);
        }
        put4(p, lanes, 0, planes);
        put4(p, lanes, 1, planes + 4);
        return;
    }
    encode_nibbles(v, nibbles);
    for (int i = 0; i < 4; i++) {
        put4(p, lanes, i, nibbles + 4 * i);
    }
    p += (size_t)4 * lanes * 4;
    const int high_bits = FORMATS[type].step == 20 ? 1 : FORMATS[type].step == 24 ? 2 : 0;
    if (high_bits == 1) {
        for (int i = 0; i < 32; i++) {
            planes[i % 4] |= (uint8_t)(v[i] >> 4 << i / 4);
        }
        put4(p, lanes, 0, planes);
    } else if (high_bits == 2) {
        for (int i = 0; i < 32; i++) {
            planes[i / 16 * 4 + i % 4] |= (uint8_t)(v[i] >> 4 << i % 16 / 4 * 2);
        }
        put4(p, lanes, 0, planes);
        put4(p, lanes, 1, planes + 4);
    }
}

inline void load_row(Type type, const uint8_t *p, int lanes, Step &step) {
    uint8_t *v = step.values;
    if (type == Q8_0) {
        for (int i = 0; i < 8; i++) {
            get4(p, lanes, i, v + 4 * i);
        }
        return;
    }
    if (FORMATS[type].step == 12) {
        uint8_t bytes[12];
        for (int i = 0; i < 3; i++) {
            get4(p, lanes, i, bytes + 4 * i);
        }
        for (int i = 0; i < 12; i++) {
            v[i] = bytes[i] & 7;
            v[12 + i] = bytes[i] >> 3 & 7;
        }
        for (int i = 0; i < 8; i++) {
            v[24 + i] = (uint8_t)(bytes[i] >> 6 | (bytes[8 + i % 4] >> (6 + i / 4) & 1) << 2);
        }
        return;
    }
    uint8_t nibbles[16], planes[8];
    if (FORMATS[type].step == 4) {
        get4(p, lanes, 0, planes);
        for (int i = 0; i < 32; i++) {
            v[i] = planes[i % 4] >> i / 4 & 1;
        }
        return;
    }
    if (FORMATS[type].step == 8) {
        get4(p, lanes, 0, planes);
        get4(p, lanes, 1, planes + 4);
        for (int i = 0; i < 32; i++) {
            v[i] = planes[i / 16 * 4 + i % 4] >> i % 16 / 4 * 2 & 3;
        }
        return;
    }
    for (int i = 0; i < 4; i++) {
        get4(p, lanes, i, nibbles + 4 * i);
    }
    decode_nibbles(nibbles, v);
    p += (size_t)4 * lanes * 4;
    const int high_bits = FORMATS[type].step == 20 ? 1 : FORMATS[type].step == 24 ? 2 : 0;
    if (high_bits == 1) {
        get4(p, lanes, 0, planes);
        for (int i = 0; i < 32; i++) {
            v[i] |= (uint8_t)((planes[i % 4] >> i / 4 & 1) << 4);
        }
    } else if (high_bits == 2) {
        get4(p, lanes, 0, planes);
        get4(p, lanes, 1, planes + 4);
        for (int i = 0; i < 32; i++) {
            v[i] |= (uint8_t)((planes[i / 16 * 4 + i % 4] >> i % 16 / 4 * 2 & 3) << 4);
        }
    }
}

} // namespace
} // namespace edgespec
