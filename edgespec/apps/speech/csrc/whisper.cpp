// The C interface: checks what comes in, and turns failures into a line of text.
#include "edgespec_whisper.h"

#include "model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <new>

using namespace edgespec::whisper;

struct es_whisper_model {
    std::shared_ptr<Model> model;
};
struct es_whisper_audio {
    std::shared_ptr<Audio> audio;
};
struct es_whisper_cache {
    std::unique_ptr<Cache> cache;
    mutable std::mutex mutex = {}; // of the sequences
};

namespace {

constexpr int32_t MOST_SEQUENCES = 256, MOST_THREADS = 1024;

// What `make` returns, or `failed` with the reason.
template <class Result, class Make>
Result guarded(char *reason, size_t n_reason, Result failed, const Make &make) {
    const auto say = [&](const char *text) {
        if (reason && n_reason > 0) {
            snprintf(reason, n_reason, "%s", text);
        }
        return failed;
    };
    try {
        return make();
    } catch (const std::bad_alloc &) {
        return say("out of memory");
    } catch (const std::exception &error) {
        return say(error.what());
    }
}

void check_floats(const float *x, size_t n, size_t wanted, const char *what) {
    if (!x || n != wanted) {
        throw Failure(std::string(what) + " has another size than the model's");
    }
    if (!std::all_of(x, x + n, [](float v) { return isfinite(v); })) {
        throw Failure(std::string(what) + " has numbers that are not finite");
    }
}

} // namespace

extern "C" {

es_whisper_model *es_whisper_open(const char *path, int32_t n_threads, int32_t kernels, char *reason, size_t n_reason) {
    return guarded(reason, n_reason, (es_whisper_model *)nullptr, [&] {
        if (!path || n_threads < 1 || n_threads > MOST_THREADS) {
            throw Failure("no path, or no possible number of threads");
        }
        return new es_whisper_model{std::make_shared<Model>(path, n_threads, kernels != 0)};
    });
}

void es_whisper_free(es_whisper_model *model) { delete model; }

es_whisper_dims es_whisper_get_dims(const es_whisper_model *model) { return model->model->dims(); }

int es_whisper_alignment_heads(const es_whisper_model *model, int32_t *pairs, size_t n_pairs) {
    const std::vector<int32_t> &heads = model->model->alignment_heads();
    if (n_pairs * 2 != heads.size()) {
        return -1;
    }
    std::copy(heads.begin(), heads.end(), pairs);
    return 0;
}

const char *es_whisper_kernels_reason(const es_whisper_model *model) { return model->model->kernels_reason().c_str(); }

es_whisper_audio *es_whisper_encode(es_whisper_model *model, const float *mel, size_t n, char *reason,
                                    size_t n_reason) {
    return guarded(reason, n_reason, (es_whisper_audio *)nullptr, [&] {
        const es_whisper_dims &d = model->model->dims();
        check_floats(mel, n, (size_t)d.n_mels * 2 * (size_t)d.n_audio_ctx, "the mel spectrogram");
        auto audio = std::make_shared<Audio>(model->model);
        model->model->encode(mel, *audio->cross, audio->states);
        return new es_whisper_audio{std::move(audio)};
    });
}

es_whisper_audio *es_whisper_cross_from(es_whisper_model *model, const float *states, size_t n, char *reason,
                                        size_t n_reason) {
    return guarded(reason, n_reason, (es_whisper_audio *)nullptr, [&] {
        const es_whisper_dims &d = model->model->dims();
        check_floats(states, n, (size_t)d.n_audio_ctx * (size_t)d.n_audio_state, "the encoder's output");
        auto audio = std::make_shared<Audio>(model->model);
        audio->states.assign(states, states + n);
        model->model->hear(audio->states, *audio->cross);
        return new es_whisper_audio{std::move(audio)};
    });
}

void es_whisper_audio_free(es_whisper_audio *audio) { delete audio; }

int es_whisper_states(const es_whisper_audio *audio, float *states, size_t n) {
    const std::vector<float> &held = audio->audio->states;
    if (n != held.size()) {
        return -1;
    }
    std::copy(held.begin(), held.end(), states);
    return 0;
}

es_whisper_cache *es_whisper_cache_new(es_whisper_audio *const *windows, size_t n_windows, int32_t n_sequences,
                                       char *reason, size_t n_reason) {
    return guarded(reason, n_reason, (es_whisper_cache *)nullptr, [&] {
        if (n_sequences < 1 || n_windows < 1 || n_windows > (size_t)(MOST_SEQUENCES / n_sequences)) {
            throw Failure("a cache has 1 to " + std::to_string(MOST_SEQUENCES) + " sequences");
        }
        std::vector<std::shared_ptr<Audio>> heard;
        for (size_t i = 0; i < n_windows; i++) {
            if (windows[i]->audio->model != windows[0]->audio->model) {
                throw Failure("a cache's windows are of one model");
            }
            heard.push_back(windows[i]->audio);
        }
        return new es_whisper_cache{std::make_unique<Cache>(std::move(heard), n_sequences), {}};
    });
}

void es_whisper_cache_free(es_whisper_cache *cache) { delete cache; }

int es_whisper_forward(es_whisper_cache *cache, const es_whisper_part *parts, size_t n_parts, float *logits, size_t n,
                       char *reason, size_t n_reason) {
    return guarded(reason, n_reason, -1, [&] {
        const std::lock_guard<std::mutex> lock(cache->mutex);
        std::vector<Part> wanted;
        for (size_t i = 0; i < n_parts; i++) {
            const es_whisper_part &p = parts[i];
            wanted.push_back({p.sequence, p.tokens, p.n_tokens, p.n_logits, p.parents, p.n_parents});
        }
        cache->cache->forward(wanted, logits, n);
        return 0;
    });
}

int es_whisper_n_past(const es_whisper_cache *cache, int32_t sequence) {
    const std::lock_guard<std::mutex> lock(cache->mutex);
    return cache->cache->sequences.n_past(sequence);
}

int es_whisper_rewind(es_whisper_cache *cache, int32_t sequence, int32_t n_keep) {
    const std::lock_guard<std::mutex> lock(cache->mutex);
    return cache->cache->sequences.rewind(sequence, n_keep) ? 0 : -1;
}

int es_whisper_reorder(es_whisper_cache *cache, const int32_t *sources, size_t n) {
    const std::lock_guard<std::mutex> lock(cache->mutex);
    return cache->cache->reorder(sources, n) ? 0 : -1;
}

int es_whisper_cross_attention(es_whisper_cache *cache, const int32_t *tokens, size_t n_tokens, float *weights,
                               size_t n, float *logits, size_t n_logits, char *reason, size_t n_reason) {
    return guarded(reason, n_reason, -1, [&] {
        const es_whisper_dims &d = cache->cache->dims();
        if (n_tokens < 1 || n != (size_t)d.n_alignment_heads * n_tokens * (size_t)d.n_audio_ctx) {
            throw Failure("the room for weights does not fit");
        }
        const size_t n_rows = n_logits / (size_t)d.n_vocab;
        if (n_rows > n_tokens || n_rows * (size_t)d.n_vocab != n_logits) {
            throw Failure("the room for logits does not fit");
        }
        cache->cache->cross_attention(std::vector<int32_t>(tokens, tokens + n_tokens), weights, logits, n_rows);
        return 0;
    });
}

} // extern "C"
