#include "model.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace edgespec::whisper {

namespace {

constexpr uint16_t HIDDEN = 0xFC00; // minus infinity in F16
constexpr size_t MOST_GRAPHS = 64;
constexpr char NO_MEMORY[] = "there is not enough memory for the decoder";
constexpr char NOT_HERE[] = "edgespec's kernels are not in use";

// Cells up to the highest in use: in steps, so that few graphs serve all lengths.
int64_t round_up(int64_t n, int64_t n_cells) {
    const int64_t step = n <= 512 ? 64 : 256;
    return std::min(n_cells, (n + step - 1) / step * step);
}

} // namespace

// ---- memory that is used again ----

std::unique_ptr<Memory> MemoryPool::take(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto fits = [size](const auto &memory) { return memory->size() == size; };
    const auto found = std::find_if(free_.begin(), free_.end(), fits);
    if (found == free_.end()) {
        return std::make_unique<Memory>(api_, size);
    }
    std::unique_ptr<Memory> memory = std::move(*found);
    free_.erase(found);
    return memory;
}

void MemoryPool::give_back(std::unique_ptr<Memory> memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(memory));
    if (free_.size() > MOST_KEPT) {
        free_.erase(free_.begin());
    }
}

// ---- loading ----

Model::Model(const std::string &path, int n_threads, bool wants_kernels) {
    if (const std::string problem = api_.load(); !problem.empty()) {
        throw Failure(problem);
    }
    file_ = std::make_unique<ModelFile>(api_, path);
    ggml_backend_dev_t kernels = wants_kernels ? api_.ggml_backend_dev_by_name("edgespec") : nullptr;
    kernels_reason_ = kernels ? "" : NOT_HERE;
    try {
        if (kernels) {
            start(kernels, api_.ggml_backend_dev_buffer_type(kernels), n_threads, true);
            kernels_reason_ = why_refused();
        }
        if (!kernels_reason_.empty()) {
            stop();
            start(api_.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), api_.ggml_backend_cpu_buffer_type(),
                  n_threads, false);
        }
    } catch (...) {
        stop();
        throw;
    }
    file_->forget_pages();
}

Model::~Model() { stop(); }

void Model::start(ggml_backend_dev_t device, ggml_backend_buffer_type_t matrices, int n_threads, bool for_kernels) {
    backend_ = device ? api_.ggml_backend_dev_init(device, nullptr) : nullptr;
    if (!backend_) {
        throw Failure("ggml has no backend for this processor");
    }
    ggml_backend_reg_t registry = api_.ggml_backend_dev_backend_reg(device);
    const auto set_n_threads = (ggml_backend_set_n_threads_t)api_.ggml_backend_reg_get_proc_address(
        registry, "ggml_backend_set_n_threads");
    if (set_n_threads) {
        set_n_threads(backend_, n_threads);
    }
    weights_ = std::make_unique<Weights>(api_, *file_, matrices, for_kernels);
}

void Model::stop() {
    decoders_.clear();
    encoder_.reset();
    listener_.reset();
    for (ggml_gallocr_t *memory : {&encoder_memory_, &listener_memory_, &decoder_memory_}) {
        if (*memory) {
            api_.ggml_gallocr_free(*memory);
            *memory = nullptr;
        }
    }
    weights_.reset();
    if (backend_) {
        api_.ggml_backend_free(backend_);
        backend_ = nullptr;
    }
}

// The kernels run all of a model or nothing of it: a change from one library to the other costs more than it gains.
std::string Model::why_refused() {
    const DecoderShape shape = {2, 1, 64, 64, true, {1, 1}};
    const DecoderGraph decoder(api_, dims(), *weights_, shape);
    const AudioGraph audio(api_, dims(), *weights_, dims().n_audio_layer > 0);
    for (const Graph *graph : {(const Graph *)&decoder, (const Graph *)&audio}) {
        if (const ggml_tensor *refused = graph->refused_by(backend_)) {
            const ggml_tensor *weight = refused->src[0];
            return std::string("edgespec's kernels do not run ") + api_.ggml_op_desc(refused) + " of " +
                   (weight && weight->name[0] ? weight->name : "this model");
        }
    }
    return "";
}

// ---- sound ----

AudioGraph &Model::audio_graph(bool has_encoder) {
    std::unique_ptr<AudioGraph> &graph = has_encoder ? encoder_ : listener_;
    if (!graph) {
        graph = std::make_unique<AudioGraph>(api_, dims(), *weights_, has_encoder);
    }
    return *graph;
}

void Model::encode(const float *mel, Memory &cross, std::vector<float> &states) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (dims().n_audio_layer == 0) {
        throw Failure("this model has no encoder: it takes another model's states");
    }
    AudioGraph &graph = audio_graph(true);
    graph.bind({&cross}, nullptr);
    if (!encoder_memory_) {
        encoder_memory_ = api_.ggml_gallocr_new(api_.ggml_backend_cpu_buffer_type());
        if (!api_.ggml_gallocr_alloc_graph(encoder_memory_, graph.graph())) {
            throw Failure("there is not enough memory for the encoder");
        }
    }
    // Column (mel, k) of frame t is the mel's frame t + k - 1; beyond the ends there is nothing.
    const int64_t n = 2 * dims().n_audio_ctx, n_mels = dims().n_mels, width = padded_columns(dims());
    float *const columns = (float *)graph.sound->data;
    for (int64_t t = 0; t < n; t++) {
        float *const frame = columns + t * width;
        std::fill(frame + 3 * n_mels, frame + width, 0.0f);
        for (int64_t m = 0; m < n_mels; m++) {
            const float *const row = mel + m * n;
            frame[3 * m] = t > 0 ? row[t - 1] : 0;
            frame[3 * m + 1] = row[t];
            frame[3 * m + 2] = t + 1 < n ? row[t + 1] : 0;
        }
    }
    graph.run(backend_);
    states.resize((size_t)dims().n_audio_ctx * (size_t)dims().n_audio_state);
    memcpy(states.data(), graph.states->data, states.size() * sizeof states[0]);
}

void Model::hear(const std::vector<float> &states, Memory &cross) {
    const std::lock_guard<std::mutex> lock(mutex_);
    AudioGraph &graph = audio_graph(false);
    graph.bind({&cross}, nullptr);
    if (!listener_memory_) {
        listener_memory_ = api_.ggml_gallocr_new(api_.ggml_backend_cpu_buffer_type());
        if (!api_.ggml_gallocr_alloc_graph(listener_memory_, graph.graph())) {
            throw Failure("there is not enough memory for another model's states");
        }
    }
    memcpy(graph.states->data, states.data(), states.size() * sizeof states[0]);
    graph.run(backend_);
}

// ---- tokens ----

DecoderGraph &Model::decoder_graph(const DecoderShape &shape) {
    const auto found = decoders_.find(shape);
    if (found != decoders_.end()) {
        found->second.used = ++n_used_;
        return *found->second.graph;
    }
    if (decoders_.size() >= MOST_GRAPHS) {
        const auto older = [](const auto &a, const auto &b) { return a.second.used < b.second.used; };
        decoders_.erase(std::min_element(decoders_.begin(), decoders_.end(), older));
    }
    auto graph = std::make_unique<DecoderGraph>(api_, dims(), *weights_, shape);
    DecoderGraph &made = *graph;
    decoders_.emplace(shape, Kept{std::move(graph), ++n_used_});
    return made;
}

// All graphs lie in the same memory, which is made for the largest: they run one after the other.
void Model::reserve(const Memory &window, const Memory &self, int64_t n_cells) {
    if (n_cells <= n_reserved_) {
        return;
    }
    decoders_.clear(); // they lie in the memory that goes
    if (!decoder_memory_) {
        decoder_memory_ = api_.ggml_gallocr_new(api_.ggml_backend_cpu_buffer_type());
    }
    const int64_t n = MOST_TOKENS;
    for (const int64_t n_logits : {n, n - 1}) {
        DecoderGraph largest(api_, dims(), *weights_, {n, n_logits, n_cells, n_cells, true, {n}});
        largest.bind({&window}, &self);
        if (!api_.ggml_gallocr_reserve(decoder_memory_, largest.graph())) {
            throw Failure(NO_MEMORY);
        }
    }
    n_reserved_ = n_cells;
}

void Model::allocate(const DecoderShape &shape) {
    const size_t before = api_.ggml_gallocr_get_buffer_size(decoder_memory_, 0);
    if (!api_.ggml_gallocr_alloc_graph(decoder_memory_, decoders_.at(shape).graph->graph())) {
        decoders_.clear();
        throw Failure(NO_MEMORY);
    }
    if (api_.ggml_gallocr_get_buffer_size(decoder_memory_, 0) != before) { // the others lie in the memory that went
        auto kept = decoders_.extract(shape);
        decoders_.clear();
        decoders_.insert(std::move(kept));
    }
}

void Model::decode(const Heard &heard, const Memory &self, int64_t n_cells, const std::vector<Placed> &placed,
                   float *logits, std::vector<std::vector<float>> *queries) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reserve(*heard.windows[0], self, n_cells);
    for (size_t first = 0; first < placed.size(); first += MOST_TOKENS) {
        const size_t n = std::min(MOST_TOKENS, placed.size() - first);
        decode_some(heard, self, n_cells, &placed[first], n, logits, queries);
        for (size_t i = first; i < first + n; i++) {
            logits += placed[i].wants_logits ? dims().n_vocab : 0;
        }
    }
}

void Model::decode_some(const Heard &heard, const Memory &self, int64_t n_cells, const Placed *placed, size_t n,
                        float *logits, std::vector<std::vector<float>> *queries) {
    int64_t n_seen = 0, n_wanted = 0;
    std::vector<const Memory *> windows;
    std::vector<int64_t> listeners;
    for (const Placed *token = placed; token < placed + n; token++) {
        const Memory *const window = heard.of(token->sequence);
        if (windows.empty() || windows.back() != window) {
            windows.push_back(window);
            listeners.push_back(0);
        }
        listeners.back()++;
        n_wanted += token->wants_logits;
        n_seen = std::max<int64_t>(n_seen, *std::max_element(token->sees.begin(), token->sees.end()) + 1);
    }
    const DecoderShape shape = {(int64_t)n, std::max<int64_t>(1, n_wanted), round_up(n_seen, n_cells), n_cells,
                                queries != nullptr, std::move(listeners)};
    DecoderGraph &graph = decoder_graph(shape);
    graph.bind(windows, &self);
    if (!graph.logits->data) {
        allocate(shape);
    }
    set_inputs(graph, shape, placed);
    graph.run(backend_);
    if (n_wanted > 0) {
        memcpy(logits, graph.logits->data, (size_t)(n_wanted * dims().n_vocab) * sizeof(float));
    }
    for (size_t i = 0; queries && i < graph.queries.size(); i++) {
        const float *const rows = (const float *)graph.queries[i]->data;
        std::vector<float> &of_layer = (*queries)[i];
        of_layer.insert(of_layer.end(), rows, rows + n * (size_t)dims().n_text_state);
    }
}

void Model::set_inputs(DecoderGraph &graph, const DecoderShape &shape, const Placed *placed) const {
    const Stored &table = weights_->embeddings;
    const ggml_to_float_t to_float = api_.ggml_get_type_traits(table.type)->to_float;
    const size_t row_bytes = table.size / (size_t)table.rows;
    float *embeddings = (float *)graph.embeddings->data;
    uint16_t *mask = (uint16_t *)graph.mask->data;
    std::fill(mask, mask + shape.n_seen * shape.n_tokens, HIDDEN);
    int32_t *wanted = graph.wanted ? (int32_t *)graph.wanted->data : nullptr;
    if (wanted) {
        *wanted = 0; // a pass whose logits nobody wants computes some
    }
    for (int64_t i = 0; i < shape.n_tokens; i++) {
        const char *const row = table.data + row_bytes * (size_t)placed[i].token;
        if (table.type == GGML_TYPE_F32) {
            memcpy(embeddings, row, row_bytes);
        } else {
            to_float(row, embeddings, table.columns);
        }
        embeddings += table.columns;
        ((int32_t *)graph.positions->data)[i] = placed[i].position;
        ((int64_t *)graph.cells->data)[i] = placed[i].cell;
        for (const int32_t cell : placed[i].sees) {
            mask[i * shape.n_seen + cell] = 0;
        }
        if (wanted && placed[i].wants_logits) {
            *wanted++ = (int32_t)i;
        }
    }
}

void Model::widen(const void *halves, float *out, int64_t n) const {
    api_.ggml_get_type_traits(GGML_TYPE_F16)->to_float(halves, out, n);
}

} // namespace edgespec::whisper
