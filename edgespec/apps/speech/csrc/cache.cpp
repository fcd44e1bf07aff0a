// The KV cache of the sequences that listen to one window, and what their tokens listen to.
#include "model.h"

#include <math.h>

#include <algorithm>

namespace edgespec::whisper {

namespace {

constexpr int64_t OF_TREES = 64; // cells beside those of whole sequences

int64_t cells_for(const es_whisper_dims &d, int32_t n_sequences) {
    return (int64_t)n_sequences * ((d.n_text_ctx + 63) / 64 * 64) + OF_TREES;
}

// weights[j] = softmax over j of scale * q . keys[j].
void listen(const float *q, const std::vector<float> &keys, int64_t width, int64_t n, float scale, float *weights) {
    std::fill(weights, weights + n, 0.0f);
    for (int64_t d = 0; d < width; d++) { // keys[d][j]
        const float *const key = keys.data() + d * n;
        const float x = q[d] * scale;
        for (int64_t j = 0; j < n; j++) {
            weights[j] += x * key[j];
        }
    }
    const float largest = *std::max_element(weights, weights + n);
    float sum = 0;
    for (int64_t j = 0; j < n; j++) {
        weights[j] = expf(weights[j] - largest);
        sum += weights[j];
    }
    for (int64_t j = 0; j < n; j++) {
        weights[j] /= sum;
    }
}

} // namespace

Cache::Cache(std::vector<std::shared_ptr<Audio>> windows, int32_t n_sequences)
    : sequences(n_sequences * (int32_t)windows.size(),
                (int32_t)cells_for(windows[0]->model->dims(), n_sequences * (int32_t)windows.size()),
                windows[0]->model->dims().n_text_ctx),
      windows_(std::move(windows)), n_sequences_(n_sequences),
      n_cells_(cells_for(dims(), n_sequences * (int32_t)windows_.size())),
      self_(model().pool().take(2 * self_bytes(dims(), n_cells_))) {}

Cache::~Cache() { model().pool().give_back(std::move(self_)); }

Heard Cache::heard() const {
    Heard heard = {{}, n_sequences_};
    for (const std::shared_ptr<Audio> &window : windows_) {
        heard.windows.push_back(window->cross.get());
    }
    return heard;
}

bool Cache::reorder(const int32_t *sources, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (sources[i] < 0 || sources[i] / n_sequences_ != (int32_t)i / n_sequences_) {
            return false;
        }
    }
    return sequences.reorder(sources, n);
}

void Cache::check_tokens(const Part &part) const {
    for (size_t i = 0; i < part.n_tokens; i++) {
        if (part.tokens[i] < 0 || part.tokens[i] >= dims().n_vocab) {
            throw Failure("the token " + std::to_string(part.tokens[i]) + " is not in the vocabulary");
        }
    }
}

void Cache::forward(const std::vector<Part> &parts, float *logits, size_t n_floats) {
    size_t n_wanted = 0;
    for (const Part &part : parts) {
        check_tokens(part);
        n_wanted += part.n_logits;
    }
    if (n_wanted * (size_t)dims().n_vocab != n_floats) {
        throw Failure("the room for logits does not fit");
    }
    std::vector<Placed> placed;
    if (const char *problem = sequences.append(parts, placed)) {
        throw Failure(problem);
    }
    try {
        model().decode(heard(), *self_, n_cells_, placed, logits, nullptr);
    } catch (...) {
        sequences.undo(parts);
        throw;
    }
    sequences.keep_trunks(parts);
}

void Cache::cross_attention(const std::vector<int32_t> &tokens, float *weights, float *logits, size_t n_rows) const {
    Cache other({windows_[0]}, 1); // this one stays as it is
    const Part part = {0, tokens.data(), tokens.size(), n_rows, nullptr, 0};
    check_tokens(part);
    std::vector<Placed> placed;
    if (const char *problem = other.sequences.append({part}, placed)) {
        throw Failure(problem);
    }
    std::vector<std::vector<float>> queries((size_t)dims().n_text_layer);
    model().decode(other.heard(), *other.self_, other.n_cells_, placed, logits, &queries);
    const CrossLayout layout = model().cross_layout();
    const int64_t n = dims().n_audio_ctx, state = dims().n_text_state, width = state / dims().n_text_head;
    std::vector<float> rows((size_t)(n * width)), keys((size_t)(n * width));
    for (size_t i = 0; i < model().alignment_heads().size(); i += 2) {
        const int64_t layer = model().alignment_heads()[i], head = model().alignment_heads()[i + 1];
        const size_t offset = layout.aligned() + i / 2 * layout.aligned_bytes();
        model().widen(windows_[0]->cross->data() + offset, rows.data(), n * width);
        for (int64_t j = 0; j < n; j++) {
            for (int64_t d = 0; d < width; d++) {
                keys[(size_t)(d * n + j)] = rows[(size_t)(j * width + d)];
            }
        }
        for (size_t t = 0; t < tokens.size(); t++, weights += n) {
            const float *const q = queries[(size_t)layer].data() + (int64_t)t * state + head * width;
            listen(q, keys, width, n, 1 / sqrtf((float)width), weights);
        }
    }
}

} // namespace edgespec::whisper
