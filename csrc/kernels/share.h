// How threads share the work of a step.
#pragma once

#include "tensor.h"

#include <algorithm>

namespace edgespec {

// This thread's share [first, last) of n units.
struct Share {
    int64_t first, last;
    Share(int64_t units, int thread, int n) : first(units * thread / n), last(units * (thread + 1) / n) {}
};

// Calls f(row, first column, last column) for this thread's part of the rows; few rows are cut in pieces.
template <class F> void each_part(const ggml::Tensor *t, int thread, int n, const F &f) {
    const int64_t rows = ggml::n_rows(t), columns = t->ne[0];
    const int64_t pieces = rows >= n || columns < 1024 ? 1 : n;
    const int64_t length = ((columns + pieces - 1) / pieces + 15) / 16 * 16;
    const Share share(rows * pieces, thread, n);
    for (int64_t unit = share.first; unit < share.last; unit++) {
        const int64_t first = unit % pieces * length, last = std::min(columns, first + length);
        if (first < last) {
            f(unit / pieces, first, last);
        }
    }
}

} // namespace edgespec
