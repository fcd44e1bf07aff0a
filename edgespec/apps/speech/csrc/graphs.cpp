#include "graphs.h"

#include <math.h>
#include <sys/mman.h>

#include <tuple>

namespace edgespec::whisper {

namespace {

constexpr float EPSILON = 1e-5f;   // of the norms
constexpr size_t PER_LAYER = 64, PER_WINDOW = 8, BESIDE = 64; // tensors of a graph, at most; each layer listens
constexpr size_t HALF = 2, FLOAT = 4;         // bytes
constexpr size_t Q8_BYTES = 34, Q8_NUMBERS = 32; // a block of Q8_0, as which rows are packed
constexpr int64_t PACKED_STEP = 64;              // they are padded to so many rows and columns at most

} // namespace

CrossLayout::CrossLayout(const es_whisper_dims &d, bool is_packed)
    : packed(is_packed), width(d.n_text_state / d.n_text_head), n_ctx(d.n_audio_ctx),
      n_heads((int64_t)d.n_text_head * d.n_text_layer), n_aligned_((size_t)d.n_alignment_heads) {
    const auto whole = [](int64_t n) { return (size_t)((n + PACKED_STEP - 1) / PACKED_STEP * PACKED_STEP); };
    head_bytes = packed ? whole(width) * whole(n_ctx) * Q8_BYTES / Q8_NUMBERS : aligned_bytes();
}
size_t self_bytes(const es_whisper_dims &d, int64_t n_cells) {
    return (size_t)n_cells * (size_t)d.n_text_state * (size_t)d.n_text_layer * HALF;
}

// ---- memory ----

Memory::Memory(const GgmlApi &api, size_t size) : api_(api), size_(size) {
    void *const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        throw Failure("there is not enough memory for keys and values");
    }
    data_ = (char *)mapped;
    buffer_ = api_.ggml_backend_cpu_buffer_from_ptr(data_, size_);
    if (!buffer_) {
        munmap(data_, size_);
        throw Failure("there is not enough memory for keys and values");
    }
}

Memory::~Memory() {
    api_.ggml_backend_buffer_free(buffer_);
    munmap(data_, size_);
}

// ---- what all graphs are made of ----

Graph::Graph(const GgmlApi &api, size_t n_tensors, const CrossLayout &layout) : api_(api), layout_(layout) {
    const size_t size = n_tensors * api_.ggml_tensor_overhead() + api_.ggml_graph_overhead_custom(n_tensors, false);
    context_ = api_.ggml_init({size, nullptr, true});
    if (!context_) {
        throw Failure("out of memory");
    }
    graph_ = api_.ggml_new_graph_custom(context_, n_tensors, false);
}

Graph::~Graph() { api_.ggml_free(context_); }

void Graph::bind(ggml_tensor *leaf, const Memory *memory, size_t offset) {
    if (!leaf || !memory) {
        return;
    }
    for (ggml_tensor *t = api_.ggml_get_first_tensor(context_); t; t = api_.ggml_get_next_tensor(context_, t)) {
        if (t == leaf || t->view_src == leaf) { // ggml resolves views of views
            t->data = memory->data() + offset + t->view_offs;
            t->buffer = memory->buffer();
        }
    }
}

void Graph::bind(const std::vector<const Memory *> &windows, const Memory *cache) {
    for (size_t i = 0; i < cross_k_.size(); i++) {
        bind(cross_k_[i], windows[i], 0);
        bind(cross_v_[i], windows[i], layout_.values());
    }
    bind(aligned_k_, windows[0], layout_.aligned());
    bind(self_k_, cache, 0);
    bind(self_v_, cache, cache ? cache->size() / 2 : 0);
}

const ggml_tensor *Graph::refused_by(ggml_backend_t backend) const {
    const ggml_tensor *refused = nullptr;
    for (int round = 0; round < 2; round++) { // the kernels take what is between products once they have met one
        refused = nullptr;
        for (int i = 0; i < api_.ggml_graph_n_nodes(graph_); i++) {
            const ggml_tensor *node = api_.ggml_graph_node(graph_, i);
            refused = api_.ggml_backend_supports_op(backend, node) || refused ? refused : node;
        }
    }
    return refused;
}

void Graph::run(ggml_backend_t backend) const {
    if (api_.ggml_backend_graph_compute(backend, graph_) != GGML_STATUS_SUCCESS) {
        throw Failure("ggml could not run the pass: out of memory?");
    }
}

ggml_tensor *Graph::input(ggml_type type, int64_t n0, int64_t n1) const {
    ggml_tensor *const t = api_.ggml_new_tensor_2d(context_, type, n0, n1);
    api_.ggml_set_input(t);
    return t;
}

// Head by head, so that the keys of one follow each other.
void Graph::define_cross(size_t n_windows) {
    const ggml_type type = layout_.packed ? GGML_TYPE_I8 : GGML_TYPE_F16;
    const int64_t of_head = (int64_t)(layout_.packed ? layout_.head_bytes : layout_.head_bytes / HALF);
    for (size_t i = 0; i < n_windows; i++) {
        cross_k_.push_back(api_.ggml_new_tensor_2d(context_, type, of_head, layout_.n_heads));
        cross_v_.push_back(api_.ggml_new_tensor_2d(context_, type, of_head, layout_.n_heads));
    }
}

ggml_tensor *Graph::cross(ggml_tensor *of, size_t layer, int64_t n_heads, int64_t columns, int64_t rows) const {
    return api_.ggml_view_3d(context_, of, columns, rows, n_heads, (size_t)columns * of->nb[0], layout_.head_bytes,
                             layer * (size_t)n_heads * layout_.head_bytes);
}

ggml_tensor *Graph::normed(ggml_tensor *x, const Norm &norm) const {
    ggml_tensor *const scaled = api_.ggml_mul(context_, api_.ggml_norm(context_, x, EPSILON), norm.weight);
    return api_.ggml_add(context_, scaled, norm.bias);
}

ggml_tensor *Graph::product(ggml_tensor *x, const Linear &linear) const {
    return api_.ggml_add(context_, api_.ggml_mul_mat(context_, linear.weight, x), linear.bias);
}

ggml_tensor *Graph::attend(ggml_tensor *q, ggml_tensor *k, ggml_tensor *v, ggml_tensor *mask) const {
    const float scale = 1 / sqrtf((float)q->ne[0]);
    ggml_tensor *const y = api_.ggml_flash_attn_ext(context_, q, k, v, mask, scale, 0, 0);
    return api_.ggml_reshape_2d(context_, y, q->ne[0] * q->ne[2], q->ne[1]);
}

ggml_tensor *Graph::heads(ggml_tensor *rows, int64_t first, int64_t n, int64_t n_heads) const {
    const int64_t width = n / n_heads;
    return api_.ggml_view_3d(context_, rows, width, rows->ne[1], n_heads, rows->nb[1], (size_t)width * FLOAT,
                             (size_t)first * FLOAT);
}

ggml_tensor *Graph::mlp(ggml_tensor *x, const Block &block) const {
    ggml_tensor *const wide = api_.ggml_gelu_erf(context_, product(normed(x, block.mlp_ln), block.mlp_in));
    return api_.ggml_add(context_, x, product(wide, block.mlp_out));
}

// ---- sound ----

AudioGraph::AudioGraph(const GgmlApi &api, const es_whisper_dims &d, const Weights &weights, bool has_encoder)
    : Graph(api, (size_t)(d.n_audio_layer + d.n_text_layer + d.n_alignment_heads) * PER_LAYER + BESIDE,
            CrossLayout(d, weights.for_kernels)) {
    define_cross(1);
    if (d.n_alignment_heads > 0) {
        aligned_k_ = api_.ggml_new_tensor_3d(context_, GGML_TYPE_F16, layout_.width, layout_.n_ctx, d.n_alignment_heads);
    }
    if (has_encoder) {
        states = encode(convolve(d, weights), d, weights);
        api_.ggml_set_output(states);
    } else {
        states = input(GGML_TYPE_F32, d.n_audio_state, d.n_audio_ctx);
    }
    for (size_t i = 0; i < weights.decoder.size(); i++) {
        keep_cross(product(states, weights.decoder[i].cross_kv), d, weights, i);
    }
}

// A layer's keys and values go where the decoder looks for them. Packed values are rows of dimensions.
void AudioGraph::keep_cross(ggml_tensor *kv, const es_whisper_dims &d, const Weights &weights, size_t layer) {
    const int64_t n_heads = d.n_text_head, width = layout_.width, n = layout_.n_ctx;
    const auto copy = [&](ggml_tensor *from, ggml_tensor *to) {
        api_.ggml_build_forward_expand(graph_, api_.ggml_cpy(context_, from, to));
    };
    ggml_tensor *const values = heads(kv, d.n_text_state, d.n_text_state, n_heads);
    copy(heads(kv, 0, d.n_text_state, n_heads), cross(cross_k_[0], layer, n_heads, width, n));
    if (layout_.packed) {
        copy(api_.ggml_permute(context_, values, 1, 0, 2, 3), cross(cross_v_[0], layer, n_heads, n, width));
    } else {
        copy(values, cross(cross_v_[0], layer, n_heads, width, n));
    }
    for (size_t i = 0; i < (size_t)d.n_alignment_heads; i++) {
        if ((size_t)weights.alignment_heads[2 * i] == layer) {
            ggml_tensor *const to =
                api_.ggml_view_3d(context_, aligned_k_, width, n, 1, aligned_k_->nb[1], aligned_k_->nb[2], i * aligned_k_->nb[2]);
            copy(heads(kv, weights.alignment_heads[2 * i + 1] * width, width, 1), to);
        }
    }
}

// Both convolutions are products: the first with frames that come in threes, the second with every other three.
ggml_tensor *AudioGraph::convolve(const es_whisper_dims &d, const Weights &weights) const {
    ggml_tensor *&given = const_cast<AudioGraph *>(this)->sound;
    given = input(GGML_TYPE_F32, padded_columns(d), 2 * d.n_audio_ctx);
    ggml_tensor *const x = api_.ggml_gelu_erf(context_, product(given, weights.conv1));
    ggml_tensor *const padded = api_.ggml_concat(context_, weights.zeros, x, 1);
    // [1, state, ctx], every other frame; then three of each, the third being the first of the next: ggml makes no
    // views that overlap.
    ggml_tensor *const threes = api_.ggml_permute(
        context_, api_.ggml_view_3d(context_, padded, d.n_audio_state, 1, d.n_audio_ctx, padded->nb[1], 2 * padded->nb[1], 0),
        1, 0, 2, 3);
    threes->ne[0] = 3;
    ggml_tensor *const columns = api_.ggml_cont(context_, threes);
    ggml_tensor *const flat = api_.ggml_reshape_2d(context_, columns, 3 * d.n_audio_state, d.n_audio_ctx);
    return api_.ggml_add(context_, api_.ggml_gelu_erf(context_, product(flat, weights.conv2)), weights.audio_positions);
}

ggml_tensor *AudioGraph::encode(ggml_tensor *x, const es_whisper_dims &d, const Weights &weights) const {
    const int64_t width = d.n_audio_state;
    for (const Block &block : weights.encoder) {
        ggml_tensor *const qkv = product(normed(x, block.attn_ln), block.qkv);
        const auto part = [&](int64_t i) { return heads(qkv, i * width, width, d.n_audio_head); };
        x = api_.ggml_add(context_, x, product(attend(part(0), part(1), part(2), nullptr), block.attn_out));
        x = mlp(x, block);
    }
    return normed(x, weights.audio_ln);
}

// ---- tokens ----

bool DecoderShape::operator<(const DecoderShape &o) const {
    return std::tie(n_tokens, n_logits, n_seen, n_cells, shows_queries, listeners) <
           std::tie(o.n_tokens, o.n_logits, o.n_seen, o.n_cells, o.shows_queries, o.listeners);
}

DecoderGraph::DecoderGraph(const GgmlApi &api, const es_whisper_dims &d, const Weights &weights,
                           const DecoderShape &shape)
    : Graph(api, (size_t)d.n_text_layer * (PER_LAYER + PER_WINDOW * shape.listeners.size()) + BESIDE,
            CrossLayout(d, weights.for_kernels)) {
    define_cross(shape.listeners.size());
    self_k_ = api_.ggml_new_tensor_3d(context_, GGML_TYPE_F16, d.n_text_state, shape.n_cells, d.n_text_layer);
    self_v_ = api_.ggml_new_tensor_3d(context_, GGML_TYPE_F16, d.n_text_state, shape.n_cells, d.n_text_layer);
    embeddings = input(GGML_TYPE_F32, d.n_text_state, shape.n_tokens);
    positions = input(GGML_TYPE_I32, shape.n_tokens);
    cells = input(GGML_TYPE_I64, shape.n_tokens);
    mask = input(GGML_TYPE_F16, shape.n_seen, shape.n_tokens);
    ggml_tensor *x = api_.ggml_add(context_, embeddings, api_.ggml_get_rows(context_, weights.text_positions, positions));
    x = decode(x, d, weights, shape);
    if (shape.n_logits < shape.n_tokens) {
        wanted = input(GGML_TYPE_I32, shape.n_logits);
        x = api_.ggml_get_rows(context_, x, wanted);
    }
    logits = api_.ggml_mul_mat(context_, weights.vocabulary, normed(x, weights.text_ln));
    api_.ggml_set_output(logits);
    api_.ggml_build_forward_expand(graph_, logits);
}

ggml_tensor *DecoderGraph::decode(ggml_tensor *x, const es_whisper_dims &d, const Weights &weights,
                                  const DecoderShape &shape) {
    const int64_t width = d.n_text_state, head = width / d.n_text_head;
    for (size_t i = 0; i < weights.decoder.size(); i++) {
        const Block &block = weights.decoder[i];
        ggml_tensor *const qkv = product(normed(x, block.attn_ln), block.qkv);
        ggml_tensor *seen[2];
        for (int j = 0; j < 2; j++) { // keys, values
            ggml_tensor *const cache = j == 0 ? self_k_ : self_v_;
            const size_t offset = i * cache->nb[2];
            ggml_tensor *const layer = api_.ggml_view_2d(context_, cache, width, shape.n_cells, cache->nb[1], offset);
            ggml_tensor *const rows = api_.ggml_view_2d(context_, qkv, width, shape.n_tokens, qkv->nb[1],
                                                        (size_t)((j + 1) * width) * FLOAT);
            api_.ggml_build_forward_expand(graph_, api_.ggml_set_rows(context_, layer, rows, cells));
            seen[j] = api_.ggml_view_3d(context_, cache, head, shape.n_seen, d.n_text_head, cache->nb[1],
                                        (size_t)head * HALF, offset);
        }
        x = api_.ggml_add(context_, x, product(attend(heads(qkv, 0, width, d.n_text_head), seen[0], seen[1], mask),
                                               block.attn_out));
        ggml_tensor *const q = product(normed(x, block.cross_ln), block.cross_q);
        if (shape.shows_queries) {
            api_.ggml_set_output(q);
            queries.push_back(q);
        }
        x = mlp(api_.ggml_add(context_, x, product(listen(q, d, i, shape), block.cross_out)), block);
    }
    return x;
}

// What the tokens hear, each in its window.
ggml_tensor *DecoderGraph::listen(ggml_tensor *q, const es_whisper_dims &d, size_t layer,
                                  const DecoderShape &shape) const {
    const int64_t width = d.n_text_state, head = width / d.n_text_head;
    ggml_tensor *heard = nullptr;
    size_t first = 0; // bytes
    for (size_t i = 0; i < shape.listeners.size(); i++) {
        ggml_tensor *const rows = api_.ggml_view_2d(context_, q, width, shape.listeners[i], q->nb[1], first);
        const auto of_window = [&](ggml_tensor *of) { return cross(of, layer, d.n_text_head, head, layout_.n_ctx); };
        ggml_tensor *const y =
            attend(heads(rows, 0, width, d.n_text_head), of_window(cross_k_[i]), of_window(cross_v_[i]), nullptr);
        heard = heard ? api_.ggml_concat(context_, heard, y, 1) : y;
        first += (size_t)shape.listeners[i] * q->nb[1];
    }
    return heard;
}

} // namespace edgespec::whisper
