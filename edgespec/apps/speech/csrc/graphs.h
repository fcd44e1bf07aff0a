// Whisper's passes as ggml graphs: sound to cross keys and values; tokens to logits.
#pragma once

#include "weights.h"

#include <memory>

namespace edgespec::whisper {

// Zeroed memory that graphs read and write beside their own: caches of keys and values.
class Memory {
  public:
    Memory(const GgmlApi &api, size_t size);
    ~Memory();
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    size_t size() const { return size_; }
    char *data() const { return data_; }
    ggml_backend_buffer_t buffer() const { return buffer_; }

  private:
    const GgmlApi &api_;
    size_t size_;
    char *data_ = nullptr;
    ggml_backend_buffer_t buffer_ = nullptr;
};

// Where the keys and values lie that a decoder hears: head by head, layer by layer. Packed, they are bytes in the
// form of edgespec's attention without a mask; else rows in F16. The alignment heads' keys follow as rows in F16.
struct CrossLayout {
    CrossLayout(const es_whisper_dims &dims, bool is_packed);

    bool packed;
    int64_t width, n_ctx, n_heads; // heads of all layers
    size_t head_bytes;             // of a head's keys, and of its values
    size_t values() const { return (size_t)n_heads * head_bytes; } // offsets in bytes; the keys come first
    size_t aligned() const { return 2 * values(); }
    size_t bytes() const { return aligned() + n_aligned_ * aligned_bytes(); }
    size_t aligned_bytes() const { return (size_t)(width * n_ctx) * sizeof(uint16_t); } // of one head

  private:
    size_t n_aligned_;
};

// A graph, its tensors, and the places in `Memory` that can be changed between two runs.
class Graph {
  public:
    Graph(const GgmlApi &api, size_t n_tensors, const CrossLayout &layout);
    virtual ~Graph();
    Graph(const Graph &) = delete;
    Graph &operator=(const Graph &) = delete;

    ggml_cgraph *graph() const { return graph_; }
    // Keys and values lie in this memory from now on, those of the sound in that of each window.
    void bind(const std::vector<const Memory *> &windows, const Memory *cache);
    // The first operation that the backend does not run; nullptr: it runs all.
    const ggml_tensor *refused_by(ggml_backend_t backend) const;
    void run(ggml_backend_t backend) const;

  protected:
    const GgmlApi &api_;
    ggml_context *context_ = nullptr;
    ggml_cgraph *graph_ = nullptr;
    const CrossLayout layout_;
    std::vector<ggml_tensor *> cross_k_, cross_v_; // of each window
    ggml_tensor *self_k_ = nullptr, *self_v_ = nullptr;
    ggml_tensor *aligned_k_ = nullptr; // of the heads that follow the sound, in F16

    ggml_tensor *input(ggml_type type, int64_t n0, int64_t n1 = 1) const;
    void define_cross(size_t n_windows);
    // A layer's keys or values as attention takes them; or rows of `columns`, as they are copied.
    ggml_tensor *cross(ggml_tensor *of, size_t layer, int64_t n_heads, int64_t columns, int64_t rows) const;
    ggml_tensor *normed(ggml_tensor *x, const Norm &norm) const;
    ggml_tensor *product(ggml_tensor *x, const Linear &linear) const;
    ggml_tensor *attend(ggml_tensor *q, ggml_tensor *k, ggml_tensor *v, ggml_tensor *mask) const;
    // Heads of n columns from `first` of each row on: [width of a head, rows, heads].
    ggml_tensor *heads(ggml_tensor *rows, int64_t first, int64_t n, int64_t n_heads) const;
    ggml_tensor *mlp(ggml_tensor *x, const Block &block) const;

  private:
    void bind(ggml_tensor *leaf, const Memory *memory, size_t offset);
};

// From columns of the mel spectrogram, or from another model's states, to keys and values of the cross attention.
class AudioGraph : public Graph {
  public:
    AudioGraph(const GgmlApi &api, const es_whisper_dims &dims, const Weights &weights, bool has_encoder);
    ggml_tensor *sound = nullptr;  // [padded_columns, 2 n_audio_ctx]: for each frame, each mel of three frames
    ggml_tensor *states = nullptr; // [n_audio_state, n_audio_ctx]: the output, or the input
  private:
    ggml_tensor *convolve(const es_whisper_dims &dims, const Weights &weights) const;
    ggml_tensor *encode(ggml_tensor *x, const es_whisper_dims &dims, const Weights &weights) const;
    void keep_cross(ggml_tensor *kv, const es_whisper_dims &dims, const Weights &weights, size_t layer);
};

// What a decoder's graph depends on.
struct DecoderShape {
    int64_t n_tokens, n_logits; // n_logits >= 1
    int64_t n_seen;             // cells up to the highest in use, rounded up
    int64_t n_cells;
    bool shows_queries; // those of the cross attention are outputs, too
    std::vector<int64_t> listeners; // tokens that listen to each window, which follow each other: n_tokens in all

    bool operator<(const DecoderShape &other) const;
};

class DecoderGraph : public Graph {
  public:
    DecoderGraph(const GgmlApi &api, const es_whisper_dims &dims, const Weights &weights, const DecoderShape &shape);
    ggml_tensor *embeddings = nullptr; // [n_text_state, n_tokens]
    ggml_tensor *positions = nullptr, *cells = nullptr, *mask = nullptr;
    ggml_tensor *wanted = nullptr; // the tokens whose logits are computed; nullptr: all
    ggml_tensor *logits = nullptr;
    std::vector<ggml_tensor *> queries; // of each layer's cross attention, before the heads are split
  private:
    ggml_tensor *decode(ggml_tensor *x, const es_whisper_dims &dims, const Weights &weights, const DecoderShape &shape);
    ggml_tensor *listen(ggml_tensor *q, const es_whisper_dims &dims, size_t layer, const DecoderShape &shape) const;
};

size_t self_bytes(const es_whisper_dims &dims, int64_t n_cells);

} // namespace edgespec::whisper
