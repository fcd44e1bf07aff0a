// A product of packed weights and the tokens of a batch, in chunks that threads take one after another.
#pragma once

#include "isa.h"

#include <algorithm>
#include <atomic>

namespace edgespec {

// Tokens go through the products in tiles of about the same size, MAX_TILE or WIDE_TILE at the most: a wide one where they
// are bytes, from a number of tokens on (see wide_from).
inline int64_t wide_from(int64_t from, Acts acts) { return acts == BYTES_32 || acts == BYTES_256 ? from : INT64_MAX; }
inline int64_t tile_size(int64_t from, Acts acts, int64_t n) { return n < wide_from(from, acts) ? MAX_TILE : WIDE_TILE; }
inline int64_t tile_begin(int64_t n, int64_t tiles, int64_t t) { return n * t / tiles; }
inline int64_t n_tiles(int64_t n, int64_t most = MAX_TILE) { return (n + most - 1) / most; }

struct Product {
    const Isa &isa;
    Prefetch prefetch;
    Type type;
    int64_t rows, columns, tokens;
    const uint8_t *weights; // packed
    const int8_t *acts;     // tile by tile, see isa.h
    float *y;               // [tokens][rows]
    int64_t most = MAX_TILE; // tokens of a tile

    int64_t groups() const { return edgespec::n_groups(rows, isa.layout.lanes); }
    int64_t bytes() const { return group_bytes(type, columns, isa.layout.lanes); } // of a group
    // Of a tile whose first token is `begin`.
    const int8_t *tile(int64_t begin) const { return acts + begin * n_steps(columns) * record_bytes(FORMATS[type].acts, 1); }

    // Chunks small enough to share evenly, yet each a stream that is worth starting; and where more than one tile passes over
    // them, small enough to stay in cache. As many for each thread: ten of them keep eight threads waiting for two.
    int64_t n_chunks(int n_threads) const {
        int64_t chunks = std::min<int64_t>(n_threads * 8, std::max<int64_t>(n_threads, groups() * bytes() >> 17));
        if (n_tiles(tokens, most) > 1) {
            chunks = std::max(chunks, groups() * bytes() >> 18);
        }
        return std::min(groups(), (chunks + n_threads - 1) / n_threads * n_threads);
    }
    int64_t first_group(int64_t chunk, int64_t chunks) const { return groups() * chunk / chunks; }
    int64_t first_row(int64_t chunk, int64_t chunks) const {
        return std::min(rows, first_group(chunk, chunks) * isa.layout.lanes);
    }

    // The products of a chunk with the nc tokens of a tile, which go to y_of[c].
    void multiply(int64_t chunk, int64_t chunks, const int8_t *tile, int nc, float *const *y_of) const {
        for (int64_t g = first_group(chunk, chunks); g < first_group(chunk + 1, chunks); g++) {
            const int64_t first = g * isa.layout.lanes;
            const int n = (int)std::min<int64_t>(isa.layout.lanes, rows - first);
            if (nc > MAX_TILE) {
                isa.wide->of[type](weights + g * bytes(), n_packets(type, columns), tile, nc, y_of, first, n, prefetch.bytes);
            } else {
                isa.matmul[prefetch.level - 1]->of[type][nc - 1](weights + g * bytes(), n_packets(type, columns), tile, y_of,
                                                                 first, n, prefetch.bytes);
            }
        }
    }

    void run(int64_t chunk, int64_t chunks) const {
        // A panel fetches nothing ahead: it loses where weights have just come from memory, as for one of them.
        const bool is_prompt = most == MAX_TILE && tokens >= 2 * PANEL_TILES * MAX_TILE;
        PanelFn *const panel = is_prompt ? isa.matmul[prefetch.level - 1]->panel_of(type) : nullptr;
        const int64_t tiles = n_tiles(tokens, most), first = first_row(chunk, chunks);
        for (int64_t t = 0, together; t < tiles; t += together) {
            const int64_t begin = tile_begin(tokens, tiles, t);
            const bool fits = panel && t + PANEL_TILES <= tiles &&
                              tile_begin(tokens, tiles, t + PANEL_TILES) - begin == PANEL_TILES * MAX_TILE; // full tiles
            together = fits ? PANEL_TILES : 1;
            const int64_t nc = tile_begin(tokens, tiles, t + together) - begin;
            float *y_of[std::max(WIDE_TILE, PANEL_TILES * MAX_TILE)];
            for (int64_t c = 0; c < nc; c++) {
                y_of[c] = y + (begin + c) * rows;
            }
            if (fits) {
                panel(weights + first_group(chunk, chunks) * bytes(), n_packets(type, columns), tile(begin), PANEL_TILES, y_of,
                      first, first_row(chunk + 1, chunks) - first);
            } else {
                multiply(chunk, chunks, tile(begin), (int)nc, y_of);
            }
        }
    }
};

// f(chunk) for chunks that no other thread has taken, `taken` being n counters: first those of this thread's own range,
// which are neighbours, so that what was fetched ahead at the end of one is the beginning of the next.
template <class F> void each_chunk(std::atomic<int64_t> *taken, int64_t chunks, int thread, int n, const F &f) {
    for (int i = 0; i < n; i++) {
        const int range = (thread + i) % n;
        const int64_t first = chunks * range / n, last = chunks * (range + 1) / n;
        for (int64_t chunk; (chunk = first + taken[range].fetch_add(1, std::memory_order_relaxed)) < last;) {
            f(chunk);
        }
    }
}

} // namespace edgespec
