// Of ggml's blocks: the values and scales of 32 columns, and where they lie in a packet (weights.h draws it). For
// weights.cpp alone.
#pragma once

#include "weights.h"

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

inline void decode(Type type, const uint8_t *block, int s, Step &step) {
    uint8_t *v = step.values;
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
    if (type == Q3_K) {
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
    if (type == Q3_K) {
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

// ---- scales ----

// Q4_K and Q5_K keep eight 6-bit scales and eight 6-bit minima in 12 bytes: those of steps 0..3 are the low
// 6 bits of bytes 0..3 and 4..7; those of steps 4..7 have their low 4 bits in the halves of bytes 8..11 and
// their high 2 bits on top of bytes 0..7.
void decode_scales(const uint8_t *p, uint8_t *scales, uint8_t *minima) {
    for (int i = 0; i < 4; i++) {
        scales[i] = p[i] & 63;
        minima[i] = p[4 + i] & 63;
        scales[4 + i] = (uint8_t)((p[8 + i] & 15) | p[i] >> 6 << 4);
        minima[4 + i] = (uint8_t)(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
    }
}
void encode_scales(const uint8_t *scales, const uint8_t *minima, uint8_t *p) {
    for (int i = 0; i < 4; i++) {
        p[i] = (uint8_t)(scales[i] | scales[4 + i] >> 4 << 6);
        p[4 + i] = (uint8_t)(minima[i] | minima[4 + i] >> 4 << 6);
        p[8 + i] = (uint8_t)((scales[4 + i] & 15) | (minima[4 + i] & 15) << 4);
    }
}

// Q3_K keeps sixteen signed 6-bit scales, 32 too large, in 12 bytes: the low 4 bits of scales 0..7 and 8..15 are
// the low and the high halves of bytes 0..7; the high 2 bits of scales j, 4 + j, 8 + j and 12 + j are in byte 8 + j.
void decode_signed_scales(const uint8_t *p, uint8_t *scales) {
    for (int i = 0; i < 16; i++) {
        const int low = i < 8 ? p[i] & 15 : p[i - 8] >> 4, high = p[8 + i % 4] >> i / 4 * 2 & 3;
        scales[i] = (uint8_t)((low | high << 4) - 32);
    }
}
void encode_signed_scales(const uint8_t *scales, uint8_t *p) {
    for (int i = 0; i < 16; i++) {
        const int scale = (scales[i] + 32) & 63;
        p[i % 8] |= (uint8_t)((scale & 15) << i / 8 * 4);
        p[8 + i % 4] |= (uint8_t)(scale >> 4 << i / 4 * 2);
    }
}

// Bytes of a row's scale(s) and, for K types, of its 16 small ones, of the header of a packet.
inline void store_scales(Type type, const uint8_t *block, int s, int lanes, int row, uint8_t *header) {
    const size_t r = (size_t)row, n = (size_t)lanes;
    if (type == MXFP4) {
        header[s * n + r] = block[0];
        return;
    }
    if (FORMATS[type].steps == 2) {
        memcpy(header + 2 * (s * n + r), block, 2);
        if (FORMATS[type].header == 8) {
            memcpy(header + 2 * ((2 + s) * n + r), block + 2, 2);
        }
        return;
    }
    uint8_t small[16];
    if (type == Q6_K) {
        memcpy(header + 2 * r, block + 208, 2);
        memcpy(small, block + 192, 16);
    } else if (type == Q3_K) {
        memcpy(header + 2 * r, block + 108, 2);
        decode_signed_scales(block + 96, small);
    } else {
        memcpy(header + 2 * r, block, 2);
        memcpy(header + 2 * (n + r), block + 2, 2);
        decode_scales(block + 4, small, small + 8);
    }
    for (size_t i = 0; i < 16; i++) {
        header[4 * n + i * n + r] = small[i];
    }
}
inline void load_scales(Type type, const uint8_t *header, int s, int lanes, int row, uint8_t *block) {
    const size_t r = (size_t)row, n = (size_t)lanes;
    if (type == MXFP4) {
        block[0] = header[s * n + r];
        return;
    }
    if (FORMATS[type].steps == 2) {
        memcpy(block, header + 2 * (s * n + r), 2);
        if (FORMATS[type].header == 8) {
            memcpy(block + 2, header + 2 * ((2 + s) * n + r), 2);
        }
        return;
    }
    uint8_t small[16];
    for (size_t i = 0; i < 16; i++) {
        small[i] = header[4 * n + i * n + r];
    }
    if (type == Q6_K) {
        memcpy(block + 208, header + 2 * r, 2);
        memcpy(block + 192, small, 16);
    } else if (type == Q3_K) {
        memcpy(block + 108, header + 2 * r, 2);
        encode_signed_scales(small, block + 96);
    } else {
        memcpy(block, header + 2 * r, 2);
        memcpy(block + 2, header + 2 * (n + r), 2);
        encode_scales(small, small + 8, block + 4);
    }
}

} // namespace
} // namespace edgespec
