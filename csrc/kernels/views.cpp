#include "views.h"
#include "tensor.h"

#include <algorithm>
#include <numeric>

namespace edgespec {

using namespace ggml;

namespace {

constexpr uint16_t MASKED = 0xFC00; // minus infinity

// A bit for each of 64 cells that is visible; `values` gets the bits of their values, which are 0 if they only hide.
uint64_t visible(const uint16_t *mask, uint64_t &values) {
    int masked = 0, zero = 0;
    for (int i = 0; i < 64; i++) {
        masked += mask[i] == MASKED;
        zero += mask[i] == 0;
    }
    if (masked == 64 || zero == 64) {
        return zero ? ~(uint64_t)0 : 0;
    }
    constexpr uint64_t ONES = 0x0001000100010001; // in each of four cells
    uint64_t bits = 0;
    for (int i = 0; i < 64; i += 4) {
        uint64_t four;
        memcpy(&four, mask + i, sizeof four);
        const uint64_t other = four ^ ONES * MASKED; // 0 where masked
        const uint64_t seen = ((((other & ONES * 0x7FFF) + ONES * 0x7FFF) | other) >> 15) & ONES;
        bits |= ((seen * 0x0001000200040008) >> 48 & 15) << i; // the four bits side by side
        values |= four & seen * 0xFFFF;
    }
    return bits;
}

// Whether 64 positions follow each other.
bool are_consecutive(const int32_t *positions) {
    int others = 0;
    for (int i = 0; i < 64; i++) {
        others += positions[i] != positions[0] + i;
    }
    return others == 0;
}

template <class F> void each_cell(const uint64_t *seen, size_t n_words, const F &f) {
    for (size_t i = 0; i < n_words; i++) {
        for (uint64_t bits = seen[i]; bits; bits &= bits - 1) {
            f((int32_t)i * 64 + __builtin_ctzll(bits));
        }
    }
}

} // namespace

void Views::read(const Tensor *m, int64_t n, Cells *c, const int32_t *positions) {
    mask = m;
    cells = c;
    n_seen = 0;
    read_mask(n);
    views_.clear();
    block_ids_.clear();
    blocks_.clear();
    order_.resize((size_t)mask->ne[0]);
    if (c) {
        std::vector<uint64_t> all(n_words_);
        for (size_t i = 0; i < seen_.size(); i++) {
            all[i % n_words_] |= seen_[i];
        }
        c->check(all);
    }
    for (int64_t t = 0; t < n; t++) {
        const uint64_t *seen = &seen_[(size_t)t * n_words_];
        View view = {0, 0, block_ids_.size()};
        if (!c || !positions || !order_by_position(seen, positions[t], view)) {
            order_by_index(seen, view);
        }
        views_.push_back(view);
        for (int64_t b = view.first_block(); b < view.end_block(); b++) {
            const int64_t begin = b * ATTN_BLOCK;
            const int64_t from = std::max(view.start, begin), to = std::min(view.end, begin + ATTN_BLOCK);
            block_ids_.push_back(
                share_block(t, b, (int)(from - begin), (int)(to - begin), order_.data() + (from - view.start)));
        }
    }
    complete_blocks();
}

void Views::complete_blocks() {
    for (CellBlock &block : blocks_) {
        const int32_t *const first = block.cells + block.first, *const end = block.cells + block.last;
        block.are_neighbours =
            std::adjacent_find(first, end, [](int32_t a, int32_t b) { return b != a + 1; }) == end;
        std::fill(block.cells, block.cells + block.first, block.cells[block.first]);
        std::fill(block.cells + block.last, block.cells + ATTN_BLOCK, block.cells[block.last - 1]);
    }
}

void Views::see_all(int64_t n) {
    mask = nullptr;
    cells = nullptr;
    n_seen = n;
    is_biased = false;
    views_.assign(1, {0, n, 0});
    block_ids_.clear();
    blocks_.clear();
    for (int64_t begin = 0; begin < n; begin += ATTN_BLOCK) {
        block_ids_.push_back((int32_t)blocks_.size());
        CellBlock &block = blocks_.emplace_back();
        block.first = 0;
        block.last = (int32_t)std::min<int64_t>(ATTN_BLOCK, n - begin);
        std::iota(block.cells, block.cells + block.last, (int32_t)begin);
    }
    complete_blocks();
}

void Views::read_mask(int64_t n) {
    const int64_t n_kv = mask->ne[0];
    n_words_ = (size_t)(n_kv + 63) / 64;
    seen_.resize((size_t)n * n_words_);
    uint64_t values = 0;
    for (int64_t t = 0; t < n; t++) {
        const uint16_t *row = at<const uint16_t>(mask, t);
        uint64_t *seen = &seen_[(size_t)t * n_words_];
        for (int64_t i = 0; i < n_kv / 64; i++) {
            seen[i] = visible(row + 64 * i, values);
        }
        if (n_kv % 64) {
            uint16_t rest[64];
            std::fill(rest, rest + 64, MASKED);
            std::copy(row + n_kv / 64 * 64, row + n_kv, rest);
            seen[n_kv / 64] = visible(rest, values);
        }
    }
    is_biased = values != 0;
}

// False if the positions of the cells are not the last ones up to the token's own, each once. Cells whose position
// is not known, of a restored state, take the places that are left: llama.cpp restores in the order of cells.
bool Views::order_by_position(const uint64_t *seen, int64_t position, View &view) {
    const int32_t *known = cells->positions();
    int64_t n = 0, n_known = 0;
    for (size_t i = 0; i < n_words_; i++) {
        n += __builtin_popcountll(seen[i]);
    }
    view.end = position + 1;
    view.start = view.end - n;
    if (n == 0 || view.start < 0) {
        return false;
    }
    bool within = true;
    std::fill(order_.begin(), order_.begin() + n, -1);
    for (size_t i = 0; i < n_words_ && within; i++) {
        const int32_t cell = (int32_t)i * 64;
        if (seen[i] == ~(uint64_t)0 && are_consecutive(known + cell) && known[cell] >= view.start &&
            known[cell] + 64 <= view.end) {
            int32_t *order = &order_[(size_t)(known[cell] - view.start)];
            std::iota(order, order + 64, cell);
            n_known += 64;
            continue;
        }
        each_cell(seen + i, 1, [&](int32_t j) {
            const int64_t at = known[cell + j];
            if (at == Cells::UNKNOWN) {
                return;
            }
            if (at < view.start || at >= view.end) {
                within = false;
                return;
            }
            order_[(size_t)(at - view.start)] = cell + j;
            n_known++;
        });
    }
    if (!within || std::count(order_.begin(), order_.begin() + n, -1) != n - n_known) {
        return false;
    }
    if (n_known < n) {
        size_t place = 0;
        each_cell(seen, n_words_, [&](int32_t cell) {
            if (known[cell] == Cells::UNKNOWN) {
                while (order_[place] != -1) {
                    place++;
                }
                order_[place] = cell;
            }
        });
    }
    return true;
}

void Views::order_by_index(const uint64_t *seen, View &view) {
    int64_t n = 0;
    for (size_t i = 0; i < n_words_; i++) {
        if (seen[i] == ~(uint64_t)0) {
            std::iota(&order_[(size_t)n], &order_[(size_t)n] + 64, (int32_t)i * 64);
            n += 64;
        } else {
            each_cell(seen + i, 1, [&](int32_t j) { order_[(size_t)n++] = (int32_t)i * 64 + j; });
        }
    }
    view.start = n > 0 ? order_[0] : 0;
    view.end = view.start + n;
}

// The block of tokens before that has the same cells wherever both have one, or a new one.
int32_t Views::share_block(int64_t token, int64_t b, int from, int to, const int32_t *seen) {
    int32_t tried = -1;
    for (int64_t other = token - 1; other >= 0; other--) {
        const View &view = of(other);
        if (b < view.first_block() || b >= view.end_block()) {
            continue;
        }
        const int32_t id = block_ids(other)[b - view.first_block()];
        if (id == tried) {
            continue;
        }
        tried = id;
        CellBlock &block = blocks_[(size_t)id];
        const int low = std::max(from, block.first), high = std::min(to, block.last);
        if (low > high || memcmp(seen + (low - from), block.cells + low, (size_t)(high - low) * sizeof *seen)) {
            continue;
        }
        if (from < block.first) {
            std::copy(seen, seen + (block.first - from), block.cells + from);
            block.first = from;
        }
        if (to > block.last) {
            std::copy(seen + (block.last - from), seen + (to - from), block.cells + block.last);
            block.last = to;
        }
        return id;
    }
    CellBlock &block = blocks_.emplace_back();
    block.first = from;
    block.last = to;
    std::copy(seen, seen + (to - from), block.cells + from);
    return (int32_t)blocks_.size() - 1;
}

} // namespace edgespec
