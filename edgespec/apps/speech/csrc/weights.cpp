#include "weights.h"

#include <string.h>

#include <algorithm>

namespace edgespec::whisper {

namespace {

constexpr size_t TENSORS_OF_BLOCK = 24, TENSORS_BESIDE = 16;

std::string within(const char *part, size_t i) { return std::string(part) + ".blocks." + std::to_string(i); }

} // namespace

Weights::Weights(const GgmlApi &api, const ModelFile &file, ggml_backend_buffer_type_t matrices, bool kernels)
    : for_kernels(kernels), alignment_heads(file.alignment_heads), api_(api), file_(file) {
    const es_whisper_dims &d = file.dims;
    const size_t n = (size_t)(d.n_audio_layer + d.n_text_layer) * TENSORS_OF_BLOCK + TENSORS_BESIDE;
    for (ggml_context **context : {&plain_, &matrices_}) {
        *context = api_.ggml_init({n * api_.ggml_tensor_overhead(), nullptr, true});
    }
    try {
        if (!plain_ || !matrices_) {
            throw Failure("out of memory");
        }
        if (d.n_audio_layer > 0) {
            conv1.weight = padded("encoder.conv1.weight", 3 * d.n_mels, d.n_audio_state);
            conv1.bias = vector("encoder.conv1.bias", d.n_audio_state);
            conv2 = linear({"encoder.conv2"}, 3 * d.n_audio_state, d.n_audio_state);
            zeros = define(plain_, "zeros", {{GGML_TYPE_F32, d.n_audio_state, 1, nullptr, (size_t)d.n_audio_state * 4}});
            audio_positions = vector("encoder.positional_embedding", d.n_audio_state, d.n_audio_ctx);
            audio_ln = norm("encoder.ln_post", d.n_audio_state);
        }
        for (int32_t i = 0; i < d.n_audio_layer; i++) {
            encoder.push_back(block(within("encoder", (size_t)i), d.n_audio_state, 0));
        }
        embeddings = file.matrix("decoder.token_embedding.weight", d.n_text_state, d.n_vocab);
        vocabulary = define(embeddings.type == GGML_TYPE_F32 ? plain_ : matrices_, "decoder.token_embedding.weight",
                            {embeddings});
        text_positions = vector("decoder.positional_embedding", d.n_text_state, d.n_text_ctx);
        text_ln = norm("decoder.ln", d.n_text_state);
        for (int32_t i = 0; i < d.n_text_layer; i++) {
            decoder.push_back(block(within("decoder", (size_t)i), d.n_text_state, d.n_audio_state));
        }
        fill(plain_, api_.ggml_backend_cpu_buffer_type());
        fill(matrices_, matrices);
    } catch (...) {
        free_all();
        throw;
    }
    fills_.clear();
}

Weights::~Weights() { free_all(); }

void Weights::free_all() {
    for (ggml_backend_buffer_t buffer : buffers_) {
        api_.ggml_backend_buffer_free(buffer);
    }
    for (ggml_context *context : {plain_, matrices_}) {
        if (context) {
            api_.ggml_free(context);
        }
    }
}

ggml_tensor *Weights::define(ggml_context *context, const std::string &name, std::vector<Stored> parts) {
    int64_t rows = 0;
    for (const Stored &part : parts) {
        if (part.type != parts[0].type) {
            throw Failure(name + " has another type than what it is joined with");
        }
        rows += part.rows;
    }
    ggml_tensor *const tensor = api_.ggml_new_tensor_2d(context, parts[0].type, parts[0].columns, rows);
    api_.ggml_set_name(tensor, name.c_str());
    fills_.push_back({tensor, std::move(parts), 0});
    return tensor;
}

ggml_tensor *Weights::vector(const std::string &name, int64_t n, int64_t rows) {
    return define(plain_, name, {file_.floats(name, n, rows)});
}

Norm Weights::norm(const std::string &name, int64_t n) {
    return {vector(name + ".weight", n), vector(name + ".bias", n)};
}

ggml_tensor *Weights::padded(const std::string &name, int64_t columns, int64_t rows) {
    const Stored stored = file_.matrix(name, columns, rows);
    ggml_context *const context = stored.type == GGML_TYPE_F32 ? plain_ : matrices_;
    const int64_t wide = padded_columns(file_.dims);
    ggml_tensor *const tensor = api_.ggml_new_tensor_2d(context, stored.type, wide, rows);
    api_.ggml_set_name(tensor, name.c_str());
    fills_.push_back({tensor, {stored}, api_.ggml_row_size(stored.type, wide)});
    return tensor;
}

// A name that begins with "-" has no bias.
Linear Weights::linear(const std::vector<std::string> &names, int64_t columns, int64_t rows) {
    std::vector<Stored> weights, biases;
    for (const std::string &given : names) {
        const std::string name = given.substr(given[0] == '-');
        weights.push_back(file_.matrix(name + ".weight", columns, rows));
        const bool has_bias = given[0] != '-';
        Stored bias = {GGML_TYPE_F32, rows, 1, nullptr, (size_t)rows * sizeof(float)};
        biases.push_back(has_bias ? file_.floats(name + ".bias", rows) : bias);
    }
    Linear made;
    const bool is_plain = weights[0].type == GGML_TYPE_F32; // no kernel packs it: it stays where all can read it
    made.weight = define(is_plain ? plain_ : matrices_, names.back() + ".weight", std::move(weights));
    // One row: the parts of a bias follow each other as columns.
    made.bias = api_.ggml_new_tensor_1d(plain_, GGML_TYPE_F32, rows * (int64_t)names.size());
    fills_.push_back({made.bias, std::move(biases), 0});
    return made;
}

Block Weights::block(const std::string &name, int64_t width, int64_t cross_width) {
    Block b;
    const auto attention = [&](const char *part, const char *of) { return name + part + of; };
    b.attn_ln = norm(name + ".attn_ln", width);
    b.qkv = linear({attention(".attn", ".query"), "-" + attention(".attn", ".key"), attention(".attn", ".value")}, width,
                   width);
    b.attn_out = linear({attention(".attn", ".out")}, width, width);
    if (cross_width) {
        b.cross_ln = norm(name + ".cross_attn_ln", width);
        b.cross_q = linear({attention(".cross_attn", ".query")}, width, width);
        b.cross_kv = linear({"-" + attention(".cross_attn", ".key"), attention(".cross_attn", ".value")}, cross_width,
                            width);
        b.cross_out = linear({attention(".cross_attn", ".out")}, width, width);
    }
    b.mlp_ln = norm(name + ".mlp_ln", width);
    b.mlp_in = linear({name + ".mlp.0"}, width, 4 * width);
    b.mlp_out = linear({name + ".mlp.2"}, 4 * width, width);
    return b;
}

// Allocate the context's tensors, and bring the parts that they are made of into them.
void Weights::fill(ggml_context *context, ggml_backend_buffer_type_t type) {
    if (!api_.ggml_get_first_tensor(context)) {
        return;
    }
    ggml_backend_buffer_t buffer = api_.ggml_backend_alloc_ctx_tensors_from_buft(context, type);
    if (!buffer) {
        throw Failure("there is not enough memory for the weights");
    }
    buffers_.push_back(buffer);
    api_.ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    std::vector<char> joined;
    for (const Fill &f : fills_) {
        if (f.tensor->buffer != buffer) {
            continue;
        }
        if (f.parts.size() == 1 && f.parts[0].data && !f.row_bytes) {
            api_.ggml_backend_tensor_set(f.tensor, f.parts[0].data, 0, f.parts[0].size);
            continue;
        }
        joined.clear();
        if (f.row_bytes) {
            const Stored &part = f.parts[0];
            const size_t n = part.size / (size_t)part.rows;
            joined.resize(f.row_bytes * (size_t)part.rows);
            for (size_t r = 0; r < (size_t)part.rows; r++) {
                memcpy(joined.data() + r * f.row_bytes, part.data + r * n, n);
            }
            api_.ggml_backend_tensor_set(f.tensor, joined.data(), 0, joined.size());
            continue;
        }
        for (const Stored &part : f.parts) {
            joined.resize(joined.size() + part.size);
            if (part.data) {
                memcpy(joined.data() + joined.size() - part.size, part.data, part.size);
            }
        }
        api_.ggml_backend_tensor_set(f.tensor, joined.data(), 0, joined.size());
    }
}

} // namespace edgespec::whisper
