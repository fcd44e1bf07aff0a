#include "cells.h"

#include <string.h>

#include <algorithm>

namespace edgespec {

using namespace ggml;

void Cells::add_layer(const Tensor *cache) {
    if (layers_.empty()) {
        stride_ = cache->nb[1];
    }
    layers_.push_back(cache->data);
}

bool Cells::has_layer(const void *data) const {
    return std::find(layers_.begin(), layers_.end(), data) != layers_.end();
}

uint64_t Cells::mark(int64_t cell) const {
    uint64_t keys;
    memcpy(&keys, (const char *)layers_[0] + (size_t)cell * stride_, sizeof keys);
    return keys;
}

void Cells::write(const Tensor *index, const int32_t *positions) {
    for (int64_t i = 0; i < index->ne[0]; i++) {
        const int64_t cell =
            index->type == TYPE_I64 ? ((const int64_t *)index->data)[i] : ((const int32_t *)index->data)[i];
        if (cell >= 0 && cell < size()) {
            positions_[(size_t)cell] = positions ? positions[i] : UNKNOWN;
            written_.push_back(cell);
        }
    }
}

void Cells::settle(bool done) {
    for (const int64_t cell : written_) {
        if (done) {
            marks_[(size_t)cell] = mark(cell);
        } else {
            positions_[(size_t)cell] = UNKNOWN;
        }
    }
    written_.clear();
}

void Cells::check(const std::vector<uint64_t> &which) {
    // What the graph is about to write has no keys yet.
    std::vector<uint64_t> old(which);
    for (const int64_t cell : written_) {
        if ((size_t)cell / 64 < old.size()) {
            old[(size_t)cell / 64] &= ~((uint64_t)1 << cell % 64);
        }
    }
    for (size_t i = 0; i < old.size(); i++) {
        for (uint64_t bits = old[i]; bits; bits &= bits - 1) {
            const int64_t cell = (int64_t)i * 64 + __builtin_ctzll(bits);
            if (positions_[(size_t)cell] != UNKNOWN && mark(cell) != marks_[(size_t)cell]) {
                positions_[(size_t)cell] = UNKNOWN;
            }
        }
    }
}

} // namespace edgespec
