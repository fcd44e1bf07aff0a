// Of ggml's blocks: their scales, and where these lie in the header of a packet (weights.h draws it). For weights.cpp
// alone.
#pragma once

#include "codebooks.h"

#include <string.h>

namespace edgespec {
namespace {

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
    if (type == NVFP4) {
        for (size_t i = 0; i < 4; i++) { // 0x7F, which is no number, counts as 0: as the eighth bit alone does
            header[i * n + r] = block[i] == 0x7F ? 0x80 : block[i];
        }
        return;
    }
    if (type == Q1_0 || type == Q2_0) {
        memcpy(header + 2 * r, block, 2);
        return;
    }
    if (FORMATS[type].steps == 2) {
        memcpy(header + 2 * (s * n + r), block, 2);
        if (FORMATS[type].header == 8) {
            memcpy(header + 2 * ((2 + s) * n + r), block + 2, 2);
        }
        return;
    }
    if (type == TQ1_0 || type == TQ2_0) {
        memcpy(header + 2 * r, block + FORMATS[type].block_bytes - 2, 2);
        return;
    }
    if (type == IQ4_XS) {
        memcpy(header + 2 * r, block, 2);
        for (size_t i = 0; i < 8; i++) {
            const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = block[2 + i / 4] >> i % 4 * 2 & 3;
            header[(2 + i) * n + r] = (uint8_t)((low | high << 4) - 32);
        }
        return;
    }
    if (is_coded(type)) {
        uint8_t d[2] = {block[0], block[1]};
        if (type == IQ1_M) { // its d lies in the high nibbles of the words with the scales
            d[0] = (uint8_t)(block[49] >> 4 | (block[51] & 0xF0));
            d[1] = (uint8_t)(block[53] >> 4 | (block[55] & 0xF0));
        }
        memcpy(header + 2 * r, d, 2);
        const int halves = FORMATS[type].two_scales ? 2 : 1;
        for (int i = 0; i < 8 * halves; i++) {
            header[(2 + (size_t)i) * n + r] = coded_scale(type, block, i / halves, i % halves);
        }
        return;
    }
    uint8_t small[16];
    if (type == Q2_K) {
        memcpy(header + 2 * r, block + 80, 2);
        memcpy(header + 2 * (n + r), block + 82, 2);
        memcpy(small, block, 16);
    } else if (type == Q6_K) {
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
    if (type == NVFP4) {
        for (size_t i = 0; i < 4; i++) {
            block[i] = header[i * n + r] == 0x80 ? 0x7F : header[i * n + r];
        }
        return;
    }
    if (type == Q1_0 || type == Q2_0) {
        memcpy(block, header + 2 * r, 2);
        return;
    }
    if (FORMATS[type].steps == 2) {
        memcpy(block, header + 2 * (s * n + r), 2);
        if (FORMATS[type].header == 8) {
            memcpy(block + 2, header + 2 * ((2 + s) * n + r), 2);
        }
        return;
    }
    if (type == TQ1_0 || type == TQ2_0) {
        memcpy(block + FORMATS[type].block_bytes - 2, header + 2 * r, 2);
        return;
    }
    if (type == IQ4_XS) {
        memcpy(block, header + 2 * r, 2);
        for (size_t i = 0; i < 8; i++) {
            const int scale = (header[(2 + i) * n + r] + 32) & 63;
            block[4 + i / 2] |= (uint8_t)((scale & 15) << i % 2 * 4);
            block[2 + i / 4] |= (uint8_t)(scale >> 4 << i % 4 * 2);
        }
        return;
    }
    if (is_coded(type)) {
        const uint8_t *d = header + 2 * r;
        if (type == IQ1_M) {
            for (int i = 0; i < 4; i++) {
                block[49 + 2 * i] |= (uint8_t)((d[i / 2] >> i % 2 * 4 & 15) << 4);
            }
        } else {
            memcpy(block, d, 2);
        }
        const int halves = FORMATS[type].two_scales ? 2 : 1;
        for (int i = 0; i < 8 * halves; i++) {
            add_coded_scale(type, header[(2 + (size_t)i) * n + r], i / halves, i % halves, block);
        }
        return;
    }
    uint8_t small[16];
    for (size_t i = 0; i < 16; i++) {
        small[i] = header[4 * n + i * n + r];
    }
    if (type == Q2_K) {
        memcpy(block + 80, header + 2 * r, 2);
        memcpy(block + 82, header + 2 * (n + r), 2);
        memcpy(block, small, 16);
    } else if (type == Q6_K) {
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
