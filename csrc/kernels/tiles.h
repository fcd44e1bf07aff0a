// Tile registers: matrices of up to 16 rows of 64 bytes, and their products (Intel's AMX).
//
// In assembly, as compilers drop what is written for _tile_loadconfig (GCC's bug 114098). The same in C, for all
// processors: so that tests and sanitizers see the layout and the sums.
#pragma once

// What the tile registers are: 0..3 sums, 4 and 5 activations, 6 and 7 weights.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Of `tokens` by `lanes` sums of `columns` products.
    constexpr TileConfig(int tokens, int lanes, int columns) {
        for (int t = 0; t < 8; t++) {
            row_bytes[t] = (uint16_t)(t < 4 || t > 5 ? 4 * lanes : columns);
            rows[t] = (uint8_t)(t < 6 ? tokens : columns / 4);
        }
    }
};

#ifdef ES_TILES_IN_C
class Tiles {
  public:
    explicit Tiles(const TileConfig &config) : config_(config) {}
    void release() {}

    template <int TILE> void zero() { __builtin_memset(bytes_[TILE], 0, sizeof bytes_[TILE]); }
    template <int TILE> void load(const void *from, int64_t stride) {
        zero<TILE>();
        for (int row = 0; row < config_.rows[TILE]; row++) {
            __builtin_memcpy(bytes_[TILE][row], (const int8_t *)from + row * stride, config_.row_bytes[TILE]);
        }
    }
    template <int TILE> void store(void *to, int64_t stride) const {
        for (int row = 0; row < config_.rows[TILE]; row++) {
            __builtin_memcpy((int8_t *)to + row * stride, bytes_[TILE][row], config_.row_bytes[TILE]);
        }
    }
    template <int SUMS, int ACTS, int WEIGHTS, bool SIGNED> void multiply() {
        const int rows = config_.rows[SUMS], lanes = config_.row_bytes[SUMS] / 4, fours = config_.row_bytes[ACTS] / 4;
        if (config_.rows[ACTS] != rows || config_.row_bytes[WEIGHTS] != 4 * lanes || config_.rows[WEIGHTS] != fours) {
            __builtin_trap(); // as the processor does
        }
        for (int row = 0; row < rows; row++) {
            for (int lane = 0; lane < lanes; lane++) {
                int32_t sum = int_at(bytes_[SUMS][row], lane);
                for (int i = 0; i < 4 * fours; i++) {
                    const int8_t weight = bytes_[WEIGHTS][i / 4][4 * lane + i % 4];
                    sum += bytes_[ACTS][row][i] * (SIGNED ? weight : (int)(uint8_t)weight);
                }
                __builtin_memcpy(bytes_[SUMS][row] + 4 * lane, &sum, 4);
            }
        }
    }

  private:
    const TileConfig config_;
    int8_t bytes_[8][16][64] = {};
};
#else
class Tiles {
  public:
    explicit Tiles(const TileConfig &config) { __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
    // After use: other libraries of the process find the registers as if none had been used. No destructor, as it would
    // bring in the standard library's way with exceptions.
    void release() { __asm__ volatile("tilerelease" : : : "memory"); }

    template <int TILE> void zero() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(TILE) : "memory"); }
    template <int TILE> void load(const void *from, int64_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
    }
    template <int TILE> void store(void *to, int64_t stride) const {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
    }
    // sums + products of signed activations and weights.
    template <int SUMS, int ACTS, int WEIGHTS, bool SIGNED> void multiply() {
        if constexpr (SIGNED) {
            __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ACTS), "i"(WEIGHTS) : "memory");
        } else {
            __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ACTS), "i"(WEIGHTS) : "memory");
        }
    }
};
#endif
