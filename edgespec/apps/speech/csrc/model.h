// A Whisper model in memory, the windows of sound that it has heard, and the caches of its decoder.
#pragma once

#include "graphs.h"
#include "sequences.h"

#include <map>
#include <mutex>

namespace edgespec::whisper {

// Memory that is used again: graphs and kernels know its addresses.
class MemoryPool {
  public:
    explicit MemoryPool(const GgmlApi &api) : api_(api) {}
    std::unique_ptr<Memory> take(size_t size);
    void give_back(std::unique_ptr<Memory> memory);

  private:
    static constexpr size_t MOST_KEPT = 8; // of some windows that are heard together, and of their cache
    const GgmlApi &api_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Memory>> free_;
};

// Windows of sound, and which sequences listen to them: the first n_sequences to the first of them, and so on.
struct Heard {
    std::vector<const Memory *> windows;
    int32_t n_sequences;

    const Memory *of(int32_t sequence) const { return windows[(size_t)(sequence / n_sequences)]; }
};

class Model {
  public:
    // Raises Failure.
    Model(const std::string &path, int n_threads, bool wants_kernels);
    ~Model();

    const es_whisper_dims &dims() const { return file_->dims; }
    const std::vector<int32_t> &alignment_heads() const { return file_->alignment_heads; }
    const std::string &kernels_reason() const { return kernels_reason_; }
    MemoryPool &pool() { return pool_; }
    CrossLayout cross_layout() const { return CrossLayout(dims(), weights_->for_kernels); }

    // Fill `cross` with the keys and values of a window; `states` gets the encoder's.
    void encode(const float *mel, Memory &cross, std::vector<float> &states);
    void hear(const std::vector<float> &states, Memory &cross);

    // Run the tokens `placed` in one pass. `logits`: rows of those that want them. `queries`, if wanted: of each
    // layer a row for each token, which are of one window.
    void decode(const Heard &heard, const Memory &self, int64_t n_cells, const std::vector<Placed> &placed,
                float *logits, std::vector<std::vector<float>> *queries);
    // The largest number of tokens of a pass of the graph; more come in several.
    static constexpr size_t MOST_TOKENS = 64;
    // A row of F16 as floats.
    void widen(const void *halves, float *out, int64_t n) const;

  private:
    struct Kept {
        std::unique_ptr<DecoderGraph> graph;
        uint64_t used;
    };
    void start(ggml_backend_dev_t device, ggml_backend_buffer_type_t matrices, int n_threads, bool for_kernels);
    void stop();
    std::string why_refused();
    AudioGraph &audio_graph(bool has_encoder);
    DecoderGraph &decoder_graph(const DecoderShape &shape);
    void reserve(const Memory &window, const Memory &self, int64_t n_cells);
    void allocate(const DecoderShape &shape);
    void decode_some(const Heard &heard, const Memory &self, int64_t n_cells, const Placed *placed, size_t n,
                     float *logits, std::vector<std::vector<float>> *queries);
    void set_inputs(DecoderGraph &graph, const DecoderShape &shape, const Placed *placed) const;

    GgmlApi api_;
    std::unique_ptr<ModelFile> file_;
    MemoryPool pool_{api_};
    std::string kernels_reason_;
    ggml_backend_t backend_ = nullptr;
    std::unique_ptr<Weights> weights_;
    std::mutex mutex_; // of what runs
    std::unique_ptr<AudioGraph> encoder_, listener_;
    ggml_gallocr_t encoder_memory_ = nullptr, listener_memory_ = nullptr, decoder_memory_ = nullptr;
    int64_t n_reserved_ = 0; // cells that decoder_memory_ was made for
    std::map<DecoderShape, Kept> decoders_;
    uint64_t n_used_ = 0;
};

// A window of sound.
struct Audio {
    std::shared_ptr<Model> model;
    std::unique_ptr<Memory> cross;
    std::vector<float> states;

    Audio(std::shared_ptr<Model> m) : model(std::move(m)), cross(model->pool().take(model->cross_layout().bytes())) {}
    ~Audio() { model->pool().give_back(std::move(cross)); }
};

class Cache {
  public:
    // n_sequences of each window, all of one model.
    Cache(std::vector<std::shared_ptr<Audio>> windows, int32_t n_sequences);
    ~Cache();

    Sequences sequences;
    const es_whisper_dims &dims() const { return model().dims(); }
    // Raises Failure, with nothing changed. `n_floats`: room in `logits`.
    void forward(const std::vector<Part> &parts, float *logits, size_t n_floats);
    // As Sequences::reorder; false too if a source listens to another window.
    bool reorder(const int32_t *sources, size_t n);
    // Weights [alignment head][token][state] of a pass over `tokens` from the beginning, in another cache over the
    // first window, and the logits of the last n_rows.
    void cross_attention(const std::vector<int32_t> &tokens, float *weights, float *logits, size_t n_rows) const;

  private:
    void check_tokens(const Part &part) const;

    Model &model() const { return *windows_[0]->model; }
    Heard heard() const;

    std::vector<std::shared_ptr<Audio>> windows_;
    int32_t n_sequences_; // of each window
    int64_t n_cells_;
    std::unique_ptr<Memory> self_;
};

} // namespace edgespec::whisper
