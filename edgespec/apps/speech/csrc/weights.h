// The weights of a Whisper model in ggml's buffers: matrices packed for edgespec's kernels or as they are.
#pragma once

#include "model_file.h"

#include <functional>
#include <memory>
#include <vector>

namespace edgespec::whisper {

// y = W x + b. Several may be one: their rows follow each other.
struct Linear {
    ggml_tensor *weight = nullptr, *bias = nullptr;
};
struct Norm {
    ggml_tensor *weight = nullptr, *bias = nullptr;
};
struct Block {
    Norm attn_ln, cross_ln, mlp_ln;
    Linear qkv, attn_out;                 // query, key and value
    Linear cross_q, cross_kv, cross_out;  // of the decoder
    Linear mlp_in, mlp_out;
};

// Columns of the first convolution: whole blocks of 32, as the kernels want them.
inline int64_t padded_columns(const es_whisper_dims &dims) { return (3 * (int64_t)dims.n_mels + 31) / 32 * 32; }

class Weights {
  public:
    // Matrices go into `matrices`, vectors into ordinary memory. Raises Failure.
    Weights(const GgmlApi &api, const ModelFile &file, ggml_backend_buffer_type_t matrices, bool kernels);
    ~Weights();
    Weights(const Weights &) = delete;
    Weights &operator=(const Weights &) = delete;

    const bool for_kernels; // edgespec's: they pack what a decoder hears, too
    const std::vector<int32_t> &alignment_heads;
    Linear conv1; // with zeros after each row, to padded_columns of them
    Linear conv2;
    ggml_tensor *zeros = nullptr; // a row of the encoder's width
    ggml_tensor *audio_positions = nullptr, *text_positions = nullptr;
    std::vector<Block> encoder, decoder;
    Norm audio_ln, text_ln;
    ggml_tensor *vocabulary = nullptr; // the output matrix, which is the table of embeddings
    Stored embeddings = {};            // its rows as they are in the file

  private:
    struct Fill {
        ggml_tensor *tensor;
        std::vector<Stored> parts; // data nullptr: zeros
        size_t row_bytes = 0;      // of rows that are longer than the file's; 0: they are as long
    };
    ggml_tensor *define(ggml_context *context, const std::string &name, std::vector<Stored> parts);
    ggml_tensor *vector(const std::string &name, int64_t n, int64_t rows = 1);
    Linear linear(const std::vector<std::string> &names, int64_t columns, int64_t rows);
    ggml_tensor *padded(const std::string &name, int64_t columns, int64_t rows);
    Norm norm(const std::string &name, int64_t n);
    Block block(const std::string &name, int64_t width, int64_t cross_width);
    void fill(ggml_context *context, ggml_backend_buffer_type_t type);
    void free_all();

    const GgmlApi &api_;
    const ModelFile &file_;
    ggml_context *plain_ = nullptr, *matrices_ = nullptr;
    std::vector<Fill> fills_;
    std::vector<ggml_backend_buffer_t> buffers_;
};

} // namespace edgespec::whisper
