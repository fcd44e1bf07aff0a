// Which tensors of a graph are hidden states that are wanted, and where their rows go.
#include "hidden.h"
#include "tensor.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <new>

namespace edgespec {

using namespace ggml;

bool HiddenStates::ask(const es_hidden &asked) {
    stop();
    const int64_t n = asked.n_tokens;
    if (asked.n_layers < 1 || asked.n_layers > ES_MOST_HIDDEN || asked.width < 1 || n < 1 || !asked.wanted || !asked.out) {
        return false;
    }
    const int64_t n_wanted = std::count_if(asked.wanted, asked.wanted + n, [](uint8_t flag) { return flag != 0; });
    if (n_wanted > asked.capacity) {
        return false;
    }
    for (int i = 0; i < asked.n_layers; i++) {
        if (asked.layers[i] < ES_LAST_NORM || asked.layers[i] >= asked.n_all_layers) {
            return false;
        }
    }
    row_of_.resize((size_t)n);
    int64_t row = 0;
    for (size_t i = 0; i < row_of_.size(); i++) {
        row_of_[i] = asked.wanted[i] ? row++ : -1;
    }
    n_rows_ = (size_t)n_wanted;
    width_ = asked.width;
    out_ = asked.out;
    failed_ = false;
    columns_.resize((size_t)asked.n_layers);
    for (int i = 0; i < asked.n_layers; i++) {
        Column &column = columns_[(size_t)i];
        const int layer = asked.layers[i];
        column.of_wanted = layer == ES_LAST_NORM || layer == asked.n_all_layers - 1;
        column.next = 0;
        if (layer == ES_LAST_NORM) {
            snprintf(column.name, sizeof column.name, "result_norm");
        } else {
            snprintf(column.name, sizeof column.name, "l_out-%d", layer);
        }
    }
    return true;
}

bool HiddenStates::take(const Tensor *t, std::vector<float *> &to) {
    const auto is_it = [&](const Column &c) { return !strcmp(c.name, t->name); };
    const auto column = std::find_if(columns_.begin(), columns_.end(), is_it);
    if (column == columns_.end() || failed_) {
        return false;
    }
    const size_t n = (size_t)ggml::n_rows(t), end = column->next + n;
    if (t->type != TYPE_F32 || t->ne[0] != width_ || t->nb[0] != sizeof(float) ||
        end > (column->of_wanted ? n_rows_ : row_of_.size())) {
        failed_ = true;
        return false;
    }
    const int64_t n_columns = (int64_t)columns_.size(), place = column - columns_.begin();
    to.resize(n);
    for (size_t i = 0; i < n; i++, column->next++) {
        const int64_t row = column->of_wanted ? (int64_t)column->next : row_of_[column->next];
        to[i] = row < 0 ? nullptr : out_ + (row * n_columns + place) * width_;
    }
    return true;
}

int64_t HiddenStates::n_rows() const {
    const auto is_whole = [&](const Column &c) { return c.next == (c.of_wanted ? n_rows_ : row_of_.size()); };
    return failed_ || columns_.empty() || !std::all_of(columns_.begin(), columns_.end(), is_whole) ? -1 : (int64_t)n_rows_;
}

HiddenStates &hidden_states() {
    static thread_local HiddenStates of_thread;
    return of_thread;
}

} // namespace edgespec

using namespace edgespec;

extern "C" {

int es_kernels_keep_hidden(const es_hidden *asked) {
    if (!asked) {
        hidden_states().stop();
        return 0;
    }
    try {
        return hidden_states().ask(*asked) ? 0 : -1;
    } catch (const std::bad_alloc &) {
        hidden_states().stop();
        return -1;
    }
}

int64_t es_kernels_n_hidden() { return hidden_states().n_rows(); }
}
