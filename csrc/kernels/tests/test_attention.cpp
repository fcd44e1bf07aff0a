// Attention by itself, of every shape that is claimed (claims.cpp), on all instruction sets of this processor: near the
// softmax of the scores in double precision, and for each row the same bits in any crowd of rows as alone in a cache of
// its own. Only what a row sees is read: all else in the cache is NaN, and after the last row there is no memory.
#include "../tensor.h"
#include "../views.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

using namespace edgespec;
using ggml::Tensor;

namespace {

constexpr int64_t HEADS = 2; // of the cache; the last is read
constexpr double NEAR = 3e-5;
const char *const NAMES[] = {"avx512-vnni", "avx-vnni", "avx2", "neon-i8mm", "neon-dotprod", "neon"};

uint32_t state = 1;
uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }
int64_t below(int64_t n) { return (int64_t)next() * n >> 24; }
template <size_t N> int64_t one_of(const int64_t (&choices)[N]) { return choices[below(N)]; }

struct Shape {
    int64_t head_dim, value_dim;
    CacheFormat cache;
    int64_t tokens, group; // a row for each token and head of a group
    int64_t past, window;  // tokens before these; how many each sees, 0: all
    bool is_tree, is_shuffled, is_biased, has_positions;
    float soft_cap;
};

void check(bool ok, const Shape &s, const char *isa, const char *what) {
    if (!ok) {
        fprintf(stderr,
                "failed: %s: %s: %lld x %lld, cache %d, %lld tokens x %lld after %lld, window %lld, tree %d, shuffled %d, "
                "biased %d, positions %d, soft cap %g\n",
                isa, what, (long long)s.head_dim, (long long)s.value_dim, s.cache, (long long)s.tokens,
                (long long)s.group, (long long)s.past, (long long)s.window, s.is_tree, s.is_shuffled, s.is_biased,
                s.has_positions, (double)s.soft_cap);
        exit(1);
    }
}

// Memory that ends where its data does; full of what is NaN in all types.
class Guarded {
  public:
    explicit Guarded(size_t size) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (size + page - 1) / page * page;
        size_ = room + page;
        begin_ = (char *)mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (begin_ == MAP_FAILED || mprotect(begin_ + room, page, PROT_NONE)) {
            perror("mmap");
            exit(1);
        }
        memset(begin_, 0xFF, room);
        data = begin_ + (room - size);
    }
    ~Guarded() { munmap(begin_, size_); }
    Guarded(const Guarded &) = delete;
    Guarded &operator=(const Guarded &) = delete;

    char *data;

  private:
    char *begin_;
    size_t size_;
};

// A random F16 number of an exponent of [low, high]; returns it.
double put_half(char *p, int low, int high) {
    const uint32_t sign = next() & 1, exponent = (uint32_t)(low + below(high - low + 1)), mantissa = next() & 0x3FF;
    const uint16_t half = (uint16_t)(sign << 15 | exponent << 10 | mantissa);
    memcpy(p, &half, sizeof half);
    return ldexp(sign ? -(1024.0 + mantissa) : 1024.0 + mantissa, (int)exponent - 25);
}

// -n / 16 as F16, n in [0, 2048).
uint16_t minus_sixteenths(int64_t n) {
    if (n == 0) {
        return 0;
    }
    const int e = 63 - __builtin_clzll((unsigned long long)n);
    return (uint16_t)(0x8000 | (15 + e - 4) << 10 | (n << (10 - e) & 0x3FF));
}

// Keys or values of all tokens: as a cache has them, and the numbers.
struct Numbers {
    size_t bytes;
    std::vector<char> raw;
    std::vector<double> of;

    Numbers(int64_t n, int64_t dim, CacheFormat cache)
        : bytes((size_t)(dim * CACHE_BLOCK[cache] / 32)), raw((size_t)n * bytes), of((size_t)(n * dim)) {
        const bool is_f16 = cache == F16_CACHE;
        char *p = raw.data();
        for (size_t i = 0; i < of.size(); i += is_f16 ? 1 : 32) {
            const int high = is_f16 ? 15 : cache == Q8_CACHE ? 7 : 11; // so that numbers are of the same size
            const double first = put_half(p, high - (is_f16 ? 4 : 2), high);
            p += 2;
            of[i] = first; // the number, or the scale of 32
            for (size_t j = 0; cache == Q8_CACHE && j < 32; j++, p++) {
                *p = (char)(next() % 255 - 127);
                of[i + j] = first * (signed char)*p;
            }
            for (size_t j = 0; cache == Q4_CACHE && j < 16; j++, p++) {
                *p = (char)next();
                of[i + j] = first * ((*p & 15) - 8);
                of[i + j + 16] = first * ((*p >> 4 & 15) - 8);
            }
        }
    }
};

// A cache of some entries of `from_k` and `from_v`, and who sees them.
struct Cache {
    const Numbers &from_k, &from_v;
    int64_t cells;
    size_t k_stride, v_stride;
    Guarded keys, values, mask;
    Tensor mask_tensor = {}, key_tensor = {};
    Views views;

    Cache(int64_t n_cells, int64_t tokens, const Numbers &k, const Numbers &v)
        : from_k(k), from_v(v), cells(n_cells), k_stride(HEADS * k.bytes), v_stride(HEADS * v.bytes),
          keys((size_t)n_cells * k_stride), values((size_t)n_cells * v_stride), mask((size_t)(n_cells * tokens * 2)) {
        mask_tensor.type = ggml::TYPE_F16;
        mask_tensor.ne[0] = cells;
        mask_tensor.ne[1] = tokens;
        mask_tensor.nb[0] = 2;
        mask_tensor.nb[1] = (size_t)cells * 2;
        mask_tensor.data = mask.data;
        key_tensor.nb[1] = k_stride;
        key_tensor.data = keys.data;
        std::fill_n((uint16_t *)mask.data, cells * tokens, (uint16_t)0xFC00);
    }
    char *k() const { return keys.data + (HEADS - 1) * from_k.bytes; }
    char *v() const { return values.data + (HEADS - 1) * from_v.bytes; }
    // A token sees an entry in a cell, with so many sixteenths taken off its score.
    void show(int64_t token, int64_t cell, int64_t entry, int64_t sixteenths) {
        memcpy(k() + (size_t)cell * k_stride, &from_k.raw[(size_t)entry * from_k.bytes], from_k.bytes);
        memcpy(v() + (size_t)cell * v_stride, &from_v.raw[(size_t)entry * from_v.bytes], from_v.bytes);
        ((uint16_t *)mask.data)[token * cells + cell] = minus_sixteenths(sixteenths);
    }
};

// What a token sees, in the order of positions, up to its own.
struct Sight {
    int64_t position;
    std::vector<int64_t> entries, sixteenths; // taken off the score of each
    int64_t first_place() const { return position + 1 - (int64_t)entries.size(); }
};

struct Test {
    Shape s;
    float scale;
    Numbers k, v;
    Guarded queries;
    std::vector<Sight> sights;

    explicit Test(const Shape &shape)
        : s(shape), scale((float)(1 / sqrt((double)s.head_dim))), k(s.past + s.tokens, s.head_dim, s.cache),
          v(s.past + s.tokens, s.value_dim, s.cache), queries((size_t)(rows() * s.head_dim) * sizeof(float)) {
        float *const q = (float *)queries.data;
        for (int64_t i = 0; i < rows() * s.head_dim; i++) {
            q[i] = (float)next() / (1 << 23) * 2 - 2;
        }
        const bool has_blind = below(8) == 0;
        std::vector<std::vector<int64_t>> paths;
        for (int64_t t = 0; t < s.tokens; t++) {
            const int64_t parent = s.is_tree ? below(t + 1) - 1 : t - 1; // -1: the last of those before
            std::vector<int64_t> path = parent < 0 ? std::vector<int64_t>((size_t)s.past) : paths[(size_t)parent];
            if (parent < 0) {
                std::iota(path.begin(), path.end(), 0);
            }
            path.push_back(s.past + t);
            paths.push_back(path);
            const int64_t length = (int64_t)path.size();
            Sight sight = {length - 1, path, {}};
            if (s.window && length > s.window) {
                sight.entries.erase(sight.entries.begin(), sight.entries.end() - s.window);
            }
            if (has_blind && t % 3 == 1) {
                sight.entries.clear();
            }
            sight.sixteenths.assign(sight.entries.size(), 0);
            for (size_t i = 0; s.is_biased && i < sight.entries.size(); i++) { // as ALiBi's
                sight.sixteenths[i] = (int64_t)(sight.entries.size() - 1 - i);
            }
            sights.push_back(sight);
        }
    }

    int64_t rows() const { return s.tokens * s.group; }
    const float *query(int64_t row) const { return (const float *)queries.data + row * s.head_dim; }

    std::vector<double> expected(int64_t row) const {
        const Sight &sight = sights[(size_t)(row / s.group)];
        std::vector<double> weights, out((size_t)s.value_dim);
        double max = -INFINITY, sum = 0;
        for (size_t i = 0; i < sight.entries.size(); i++) {
            double score = 0;
            for (int64_t d = 0; d < s.head_dim; d++) {
                score += (double)query(row)[d] * k.of[(size_t)(sight.entries[i] * s.head_dim + d)];
            }
            score *= (double)scale;
            score = s.soft_cap > 0 ? (double)s.soft_cap * tanh(score / (double)s.soft_cap) : score;
            weights.push_back(score - (double)sight.sixteenths[i] / 16);
            max = std::max(max, weights.back());
        }
        for (double &weight : weights) {
            weight = exp(weight - max);
            sum += weight;
        }
        for (size_t i = 0; i < weights.size(); i++) {
            for (int64_t d = 0; d < s.value_dim; d++) {
                out[(size_t)d] += weights[i] / sum * v.of[(size_t)(sight.entries[i] * s.value_dim + d)];
            }
        }
        return out;
    }

    // All tokens in one cache, wherever the cells lie, with cells between them that nobody sees.
    void fill(Cache &cache, Cells &kept) const {
        std::vector<int64_t> cell_of((size_t)cache.cells);
        std::iota(cell_of.begin(), cell_of.end(), 0);
        for (size_t i = cell_of.size(); s.is_shuffled && i > 1; i--) {
            std::swap(cell_of[i - 1], cell_of[(size_t)below((int64_t)i)]);
        }
        std::vector<int32_t> index, positions, own;
        for (int64_t entry = 0; entry < s.past + s.tokens; entry++) {
            index.push_back((int32_t)cell_of[(size_t)entry]);
            const int64_t token = entry - s.past;
            positions.push_back((int32_t)(token < 0 ? entry : sights[(size_t)token].position));
        }
        for (int64_t t = 0; t < s.tokens; t++) {
            const Sight &sight = sights[(size_t)t];
            own.push_back((int32_t)sight.position);
            for (size_t i = 0; i < sight.entries.size(); i++) {
                cache.show(t, cell_of[(size_t)sight.entries[i]], sight.entries[i], sight.sixteenths[i]);
            }
        }
        Tensor written = {};
        written.type = ggml::TYPE_I32;
        written.ne[0] = (int64_t)index.size();
        written.data = index.data();
        kept.add_layer(&cache.key_tensor);
        kept.write(&written, positions.data());
        kept.settle(true);
        cache.views.read(&cache.mask_tensor, s.tokens, s.has_positions ? &kept : nullptr, own.data());
    }

    // One token in a cache of its own.
    void fill_alone(Cache &cache, int64_t token) const {
        const Sight &sight = sights[(size_t)token];
        for (size_t i = 0; i < sight.entries.size(); i++) {
            cache.show(0, sight.first_place() + (int64_t)i, sight.entries[i], sight.sixteenths[i]);
        }
        cache.views.read(&cache.mask_tensor, 1, nullptr, nullptr);
    }

    // Rows [first, last), of tokens that begin with `token` in the cache, as an Executor computes them.
    void attend(const Isa &isa, const Cache &cache, int64_t token, int64_t first, int64_t last, float *out) const {
        AttentionUnit unit = {};
        unit.head_dim = s.head_dim;
        unit.value_dim = s.value_dim;
        unit.rows = (int)(last - first);
        unit.blocks = cache.views.blocks();
        unit.k = cache.k();
        unit.v = cache.v();
        unit.cache = s.cache;
        unit.k_stride = (int64_t)cache.k_stride;
        unit.v_stride = (int64_t)cache.v_stride;
        unit.scale = scale;
        unit.soft_cap = s.soft_cap;
        int64_t begin = INT64_MAX, end = 0;
        BlockAhead ahead;
        for (int r = 0; r < unit.rows; r++) {
            const int64_t t = (first + r) / s.group - token;
            const Views::View &view = cache.views.of(t);
            unit.q[r] = query(first + r);
            unit.start[r] = view.start;
            unit.end[r] = view.end;
            unit.block_ids[r] = cache.views.block_ids(t);
            unit.mask[r] = cache.views.is_biased ? (const uint16_t *)cache.mask.data + t * cache.cells : nullptr;
            begin = std::min(begin, view.start / ATTN_SEGMENT * ATTN_SEGMENT);
            end = std::max(end, view.end);
            if (view.end > view.start && below(2)) {
                ahead = {unit.blocks + unit.block_ids[r][0], unit.k, unit.v};
            }
        }
        const size_t size = AttentionState::n_floats(s.value_dim, unit.rows);
        const float nan = nanf("");
        std::vector<float> memory[2] = {std::vector<float>(size, nan), std::vector<float>(size, nan)};
        const AttentionState total = AttentionState::at(memory[0].data(), s.value_dim, unit.rows);
        const AttentionState part = AttentionState::at(memory[1].data(), s.value_dim, unit.rows);
        isa.attend(unit, begin, begin + ATTN_SEGMENT, total, ahead);
        for (begin += ATTN_SEGMENT; begin < end; begin += ATTN_SEGMENT) {
            isa.attend(unit, begin, begin + ATTN_SEGMENT, part, ahead);
            isa.merge(s.value_dim, unit.rows, part, total);
        }
        for (int r = 0; r < unit.rows; r++) {
            const float factor = total.sum[r] > 0 ? 1 / total.sum[r] : 0;
            isa.scale(s.value_dim, total.out + r * s.value_dim, factor, 0, out + r * s.value_dim);
        }
    }

    void run() const {
        Cache cache(s.past + s.tokens + below(80), s.tokens, k, v);
        Cells kept(cache.cells);
        fill(cache, kept);
        const int64_t chosen = below(s.tokens);
        Cache own(std::max<int64_t>(sights[(size_t)chosen].position + 1, 1), 1, k, v);
        fill_alone(own, chosen);
        std::vector<std::vector<double>> exact;
        for (int64_t row = 0; row < rows(); row++) {
            exact.push_back(expected(row));
        }
        for (const char *name : NAMES) {
            const Isa *const isa = find_isa(name);
            if (!isa) {
                continue;
            }
            std::vector<float> out((size_t)(rows() * s.value_dim)), other(out.size());
            for (int64_t row = 0; row < rows();) {
                const int64_t last = std::min(rows(), row + 1 + below(ATTN_ROWS));
                attend(*isa, cache, 0, row, last, &out[(size_t)(row * s.value_dim)]);
                row = last;
            }
            for (int64_t i = 0; i < rows() * s.value_dim; i++) {
                const double error = fabs(out[(size_t)i] - exact[(size_t)(i / s.value_dim)][(size_t)(i % s.value_dim)]);
                check(error < NEAR, s, name, "near the softmax of the scores"); // not if it is NaN
            }
            for (int64_t row = 0; row < rows(); row++) {
                attend(*isa, cache, 0, row, row + 1, &other[(size_t)(row * s.value_dim)]);
            }
            const size_t row_size = (size_t)s.value_dim * sizeof(float);
            check(!memcmp(out.data(), other.data(), out.size() * sizeof(float)), s, name, "the same bits in a crowd");
            const int64_t first = chosen * s.group;
            attend(*isa, own, chosen, first, first + s.group, other.data());
            check(!memcmp(&out[(size_t)(first * s.value_dim)], other.data(), (size_t)s.group * row_size), s, name,
                  "the same bits in a cache of its own");
        }
    }
};

void test(int64_t head_dim, int64_t value_dim, CacheFormat cache) {
    const int64_t pasts[] = {0, 1, 63, 64, 65, 255, 256, 257, below(700), below(300)};
    const int64_t windows[] = {0, 0, 1, 40, 64, 300};
    Shape s = {};
    s.head_dim = head_dim;
    s.value_dim = value_dim;
    s.cache = cache;
    s.tokens = 1 + below((int64_t)1 << below(7));
    s.group = 1 + below(8);
    s.past = one_of(pasts);
    s.window = one_of(windows);
    s.is_tree = below(2);
    s.is_shuffled = below(2);
    s.is_biased = below(3) == 0;
    s.has_positions = s.is_shuffled || s.window || !s.past || below(2);
    s.soft_cap = below(3) == 0 ? 5.0f : 0.0f;
    Test(s).run();
}

} // namespace

int main(int n_arguments, char **arguments) {
    const int rounds = n_arguments > 1 ? atoi(arguments[1]) : 2;
    for (int round = 0; round < rounds; round++) {
        for (const int64_t head_dim : {16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 576}) {
            for (const int64_t part : {1, 5, 8, 9}) { // ninths: MLA has 8
                const int64_t value_dim = std::max<int64_t>(1, head_dim * part / 9 / 16) * 16;
                test(head_dim, value_dim, F16_CACHE);
                for (const CacheFormat cache : {Q8_CACHE, Q4_CACHE}) {
                    if (head_dim % 32 == 0) {
                        test(head_dim, (value_dim + 16) / 32 * 32, cache);
                    }
                }
            }
        }
    }
    return 0;
}
