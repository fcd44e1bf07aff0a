// The ggml plugin: an ACCEL device, whose buffer type llama.cpp offers each weight of a model first.
//
// Weights that can be packed live in that buffer type. Every context of llama.cpp then makes a backend of
// the device. The backend's device is a twin whose buffer type is the CPU's: activations stay in ordinary
// memory, which both backends use without copies. A twin that has met a packed weight also takes the small
// operations between the products, so that a whole model is one piece of work and not hundreds; one that has
// not - a model without packable weights - takes nothing, and the model runs exactly as without the plugin.
#include "edgespec_kernels.h"
#include "packed.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <string>

namespace edgespec {

using namespace ggml;

// Versions of ggml whose binary interface ggml_abi.h describes.
constexpr const char *GGML_VERSIONS[] = {"0.25.3"};

namespace {

const char *const NAME = "edgespec";

struct Plugin {
    Ggml ggml = {};
    const Isa *isa = best_isa();
    Prefetch prefetch;
    std::atomic<bool> enabled{true};
    std::string refusal;
    BufferType buffer_type = {};
    Device device = {};
    Registry registry = {};

    MappedFile file; // of the next buffer; models are loaded one at a time

    std::mutex mutex; // of what follows
    std::vector<es_packed> packed;
};

Plugin &plugin() {
    static Plugin *const p = new Plugin; // never destroyed: ggml may free buffers after our destructors ran
    return *p;
}

// ---- the buffer type ----

// Tensors that cannot be packed (adapters are put beside the weights they adapt) are kept as they are.
bool is_packed(const Tensor *t) { return !t->view_src && can_pack(t); }

size_t alloc_size(BufferType *, const Tensor *t) {
    const size_t plain = t->ne[0] ? (size_t)(t->ne[3] * (int64_t)t->nb[3]) : 0;
    return is_packed(t) ? packed_size(*plugin().isa, t) : plain;
}

void add_packed(const Buffer *buffer, const Tensor *t) {
    es_packed entry = {};
    snprintf(entry.name, sizeof entry.name, "%s", t->name);
    snprintf(entry.type, sizeof entry.type, "%s", FORMATS[find_type(t->type)].name);
    entry.rows = t->ne[1] * t->ne[2];
    entry.columns = t->ne[0];
    entry.bytes = (int64_t)packed_size(*plugin().isa, t);
    entry.data = t->data;
    entry.offset = (const char *)t->data - (const char *)buffer->context;
    const std::lock_guard<std::mutex> lock(plugin().mutex);
    plugin().packed.push_back(entry);
}

void set_tensor(Buffer *buffer, Tensor *t, const void *data, size_t offset, size_t size) {
    if (!is_packed(t)) {
        memcpy((char *)t->data + offset, data, size);
        return;
    }
    const Isa &isa = *plugin().isa;
    if (offset != 0 || size != plain_size(t)) { // a part: of a group, of a block
        std::vector<char> blocks(plain_size(t));
        unpack(isa, t, blocks.data());
        memcpy(blocks.data() + offset, data, size);
        pack(isa, t, blocks.data());
        return;
    }
    pack(isa, t, data);
    add_packed(buffer, t);
}

// Of a mapped buffer: whole weights are there already.
void keep_tensor(Buffer *buffer, Tensor *t, const void *data, size_t offset, size_t size) {
    if (is_packed(t) && offset == 0 && size == plain_size(t)) {
        add_packed(buffer, t);
    } else {
        set_tensor(buffer, t, data, offset, size);
    }
}

void get_tensor(Buffer *, const Tensor *t, void *data, size_t offset, size_t size) {
    const Tensor *whole = t;
    size_t at = offset;
    for (; whole->view_src; whole = whole->view_src) {
        at += whole->view_offs;
    }
    if (!is_packed(whole)) {
        memcpy(data, (const char *)whole->data + at, size);
        return;
    }
    std::vector<char> blocks(plain_size(whole));
    unpack(*plugin().isa, whole, blocks.data());
    memcpy(data, blocks.data() + at, size);
}

void free_buffer(Buffer *buffer) { free(buffer->context); }
void unmap_buffer(Buffer *buffer) { unmap_weights(buffer->context, buffer->size); }
void *get_base(Buffer *buffer) { return buffer->context; }
void clear(Buffer *buffer, uint8_t value) { memset(buffer->context, value, buffer->size); }

Buffer *alloc_buffer(BufferType *type, size_t size) {
    void *const map = map_weights(plugin().file, size);
    void *const memory = map ? map : alloc_weights(size);
    if (!memory) {
        return nullptr;
    }
    BufferInterface iface = {};
    iface.free_buffer = map ? unmap_buffer : free_buffer;
    iface.get_base = get_base;
    iface.set_tensor = map ? keep_tensor : set_tensor;
    iface.get_tensor = get_tensor;
    iface.clear = clear;
    return plugin().ggml.backend_buffer_init(type, iface, memory, size);
}

const char *buffer_type_name(BufferType *) { return "EDGESPEC_PACKED"; }
size_t alignment(BufferType *) { return WEIGHTS_ALIGNMENT; }
bool is_host(BufferType *) { return false; }

// ---- the backend of one context ----

struct Context {
    Executor executor;
    Device twin;
    std::atomic<bool> packed_model{false};
    Backend backend = {};
    Context(const Isa &isa, const Prefetch &prefetch) : executor(isa, prefetch, plugin().ggml) {}
};

const char *backend_name(Backend *) { return NAME; }
void free_backend(Backend *backend) { delete (Context *)backend->context; }
// Of a pass on this thread; llama.cpp has no way to hand it down with the pass.
thread_local int64_t wanted_logits = -1;

int graph_compute(Backend *backend, Graph *graph) {
    try {
        Executor &executor = ((Context *)backend->context)->executor;
        executor.wanted_logits = wanted_logits;
        executor.hidden = &hidden_states();
        return executor.compute(graph);
    } catch (const std::bad_alloc &) {
        return STATUS_ALLOC_FAILED;
    }
}
void set_n_threads(Backend *backend, int n) { ((Context *)backend->context)->executor.n_threads = std::max(1, n); }
void set_abort_callback(Backend *backend, bool (*abort)(void *), void *data) {
    Executor &executor = ((Context *)backend->context)->executor;
    executor.abort = abort;
    executor.abort_data = data;
}

bool twin_supports_op(Device *device, const Tensor *op) {
    Context &context = *(Context *)device->context;
    if (is_packed_matmul(op, plugin().ggml)) {
        context.packed_model.store(true, std::memory_order_relaxed);
        return true;
    }
    const Tensor *whole = op->view_src;
    const bool of_weights = whole && whole->buffer && whole->buffer->buft == &plugin().buffer_type;
    return context.packed_model.load(std::memory_order_relaxed) ? can_run(op, plugin().ggml) : op->op == OP_NONE || of_weights;
}
// Whether this thread asks for weights' memory: an encoder that gets one device for all asks the twin for both.
thread_local bool asks_for_weights = false;
BufferType *twin_buffer_type(Device *) {
    return asks_for_weights ? &plugin().buffer_type : plugin().ggml.backend_cpu_buffer_type();
}

// Threads of backends that this thread makes, until they are told otherwise: an encoder tells only the CPU's.
thread_local int lent_threads = 1;

Backend *init_backend(Device *, const char *) {
    static uint8_t guid[16] = {0xed, 0x9e, 0x5b, 0xec, 0x4b, 0x1f, 0x4e, 0x0a, 0x9c, 0x33, 0x60, 0x52, 0xd7, 0x18, 0xa5, 0x2c};
    Context *context = new (std::nothrow) Context(*plugin().isa, plugin().prefetch);
    if (!context) {
        return nullptr;
    }
    context->executor.n_threads = lent_threads;
    context->twin = plugin().device;
    context->twin.get_buffer_type = twin_buffer_type;
    context->twin.supports_op = twin_supports_op;
    context->twin.context = context;
    Backend &backend = context->backend;
    backend.guid = guid;
    backend.get_name = backend_name;
    backend.free = free_backend;
    backend.graph_compute = graph_compute;
    backend.device = &context->twin;
    backend.context = context;
    return &backend;
}

// ---- the device and its registry ----

const char *device_name(Device *) { return NAME; }
const char *device_description(Device *) { return plugin().isa->name; }
void device_memory(Device *, size_t *free, size_t *total) { *free = *total = 0; }
int device_type(Device *) { return DEVICE_TYPE_ACCEL; }
void device_properties(Device *device, DeviceProperties *properties) {
    *properties = {};
    properties->name = device_name(device);
    properties->description = device_description(device);
    properties->type = DEVICE_TYPE_ACCEL;
}
BufferType *device_buffer_type(Device *) { return &plugin().buffer_type; }
bool device_supports_op(Device *, const Tensor *op) {
    return op->op == OP_NONE ||
           (plugin().enabled.load() && is_packed_matmul(op, plugin().ggml));
}
bool supports_buffer_type(Device *, BufferType *type) {
    return type == &plugin().buffer_type || plugin().ggml.backend_buft_is_host(type);
}

const char *registry_name(Registry *) { return NAME; }
size_t device_count(Registry *) { return 1; }
Device *get_device(Registry *, size_t) { return &plugin().device; }
void *proc_address(Registry *, const char *name) {
    return !strcmp(name, "ggml_backend_set_n_threads")       ? (void *)set_n_threads
           : !strcmp(name, "ggml_backend_set_abort_callback") ? (void *)set_abort_callback
                                                              : nullptr;
}

// ---- is it the ggml we know? ----

// Returns why not, or nothing.
std::string look_up(Ggml &ggml) {
    void *base = dlopen("libggml-base.so.0", RTLD_NOLOAD | RTLD_NOW);
    if (!base) {
        return "libggml-base.so.0 is not loaded";
    }
    const char *missing = nullptr;
    const auto find = [&](const char *name) {
        void *symbol = dlsym(base, name);
        missing = symbol || missing ? missing : name;
        return symbol;
    };
    const auto version = (const char *(*)())find("ggml_version");
    const auto tensor_overhead = (size_t (*)())find("ggml_tensor_overhead");
    const auto op_name = (const char *(*)(int))find("ggml_op_name");
    const auto type_name = (const char *(*)(int))find("ggml_type_name");
    const auto glu_op_name = (const char *(*)(int))find("ggml_glu_op_name");
    const auto unary_op_name = (const char *(*)(int))find("ggml_unary_op_name");
    ggml.graph_n_nodes = (decltype(ggml.graph_n_nodes))find("ggml_graph_n_nodes");
    ggml.graph_node = (decltype(ggml.graph_node))find("ggml_graph_node");
    ggml.backend_buffer_init = (decltype(ggml.backend_buffer_init))find("ggml_backend_buffer_init");
    ggml.backend_buft_is_host = (decltype(ggml.backend_buft_is_host))find("ggml_backend_buft_is_host");
    ggml.nbytes = (decltype(ggml.nbytes))find("ggml_nbytes");
    ggml.backend_cpu_buffer_type = (decltype(ggml.backend_cpu_buffer_type))find("ggml_backend_cpu_buffer_type");
    dlclose(base); // it stays loaded: whoever loaded it holds it
    if (missing) {
        return std::string("ggml has no ") + missing;
    }
    const auto known = [&](const char *v) { return !strcmp(v, version()); };
    if (!std::any_of(std::begin(GGML_VERSIONS), std::end(GGML_VERSIONS), known)) {
        return std::string("ggml ") + version() + " is not a version that the kernels were checked with (" +
               GGML_VERSIONS[0] + ")";
    }
    constexpr size_t OBJECT = 32; // what ggml keeps before a tensor
    if (tensor_overhead() != sizeof(Tensor) + OBJECT) {
        char text[80];
        snprintf(text, sizeof text, "ggml's tensors have %zu bytes, not %zu", tensor_overhead(), sizeof(Tensor) + OBJECT);
        return text;
    }
    static const struct {
        int value;
        const char *name;
    } OPS[] = {{OP_NONE, "NONE"},           {OP_ADD, "ADD"},
               {OP_ADD_ID, "ADD_ID"},       {OP_SUB, "SUB"},
               {OP_MUL, "MUL"},             {OP_DIV, "DIV"},
               {OP_SQR, "SQR"},             {OP_SQRT, "SQRT"},
               {OP_SUM_ROWS, "SUM_ROWS"},   {OP_MEAN, "MEAN"},
               {OP_REPEAT, "REPEAT"},
               {OP_CONCAT, "CONCAT"},       {OP_NORM, "NORM"},
               {OP_RMS_NORM, "RMS_NORM"},   {OP_L2_NORM, "L2_NORM"},
               {OP_SSM_CONV, "SSM_CONV"},   {OP_SSM_SCAN, "SSM_SCAN"},
               {OP_GATED_DELTA_NET, "GATED_DELTA_NET"},
               {OP_MUL_MAT, "MUL_MAT"},     {OP_MUL_MAT_ID, "MUL_MAT_ID"},
               {OP_SCALE, "SCALE"},         {OP_CPY, "CPY"},
               {OP_CONT, "CONT"},           {OP_RESHAPE, "RESHAPE"},
               {OP_VIEW, "VIEW"},           {OP_PERMUTE, "PERMUTE"},
               {OP_TRANSPOSE, "TRANSPOSE"}, {OP_GET_ROWS, "GET_ROWS"},
               {OP_SET_ROWS, "SET_ROWS"},   {OP_SOFT_MAX, "SOFT_MAX"},
               {OP_ROPE, "ROPE"},           {OP_CLAMP, "CLAMP"},
               {OP_ARGSORT, "ARGSORT"},     {OP_FILL, "FILL"},
               {OP_UNARY, "UNARY"},         {OP_FLASH_ATTN_EXT, "FLASH_ATTN_EXT"},
               {OP_GLU, "GLU"}},
      TYPES[] = {{TYPE_F32, "f32"},   {TYPE_F16, "f16"}, {TYPE_Q4_0, "q4_0"},
               {TYPE_Q8_0, "q8_0"}, {TYPE_I32, "i32"}, {TYPE_I64, "i64"}},
      GLUS[] = {{GLU_REGLU, "REGLU"},
                {GLU_GEGLU, "GEGLU"},
                {GLU_SWIGLU, "SWIGLU"},
                {GLU_SWIGLU_OAI, "SWIGLU_OAI"},
                {GLU_GEGLU_QUICK, "GEGLU_QUICK"},
                {GLU_SWIGLU_CLAMP, "SWIGLU_CLAMP"}},
      UNARIES[] = {{UNARY_NEG, "NEG"},         {UNARY_TANH, "TANH"}, {UNARY_RELU, "RELU"}, {UNARY_SIGMOID, "SIGMOID"},
                   {UNARY_GELU, "GELU"},       {UNARY_SILU, "SILU"}, {UNARY_EXP, "EXP"},
                   {UNARY_SOFTPLUS, "SOFTPLUS"}, {UNARY_GELU_ERF, "GELU_ERF"}};
    std::string wrong;
    const auto check = [&](const char *(*name_of)(int), int value, const char *name) {
        if (strcmp(name_of(value), name)) {
            wrong = std::string("ggml calls ") + name_of(value) + " what the kernels know as " + name;
        }
    };
    for (const auto &op : OPS) {
        check(op_name, op.value, op.name);
    }
    for (const auto &type : TYPES) {
        check(type_name, type.value, type.name);
    }
    for (const Format &format : FORMATS) {
        check(type_name, format.ggml_type, format.name);
    }
    for (const auto &glu : GLUS) {
        check(glu_op_name, glu.value, glu.name);
    }
    for (const auto &unary : UNARIES) {
        check(unary_op_name, unary.value, unary.name);
    }
    return wrong;
}

} // namespace
} // namespace edgespec

using namespace edgespec;

// The entry that ggml_backend_load looks for.
extern "C" ES_API Registry *ggml_backend_init() {
    Plugin &p = plugin();
    p.refusal = p.isa ? look_up(p.ggml) : "this CPU has none of the instruction sets";
    if (!p.refusal.empty()) {
        return nullptr;
    }
    p.buffer_type = {buffer_type_name, alloc_buffer, alignment, nullptr, alloc_size, is_host, &p.device, nullptr};
    p.ggml.packed = &p.buffer_type;
    p.device = {};
    p.device.get_name = device_name;
    p.device.get_description = device_description;
    p.device.get_memory = device_memory;
    p.device.get_type = device_type;
    p.device.get_props = device_properties;
    p.device.init_backend = init_backend;
    p.device.get_buffer_type = device_buffer_type;
    p.device.supports_op = device_supports_op;
    p.device.supports_buft = supports_buffer_type;
    p.device.reg = &p.registry;
    p.registry = {API_VERSION, registry_name, device_count, get_device, proc_address, nullptr};
    return &p.registry;
}

extern "C" {

const char *es_kernels_isa() { return plugin().isa ? plugin().isa->name : ""; }

int es_kernels_set_isa(const char *name) {
    const Isa *isa = find_isa(name);
    if (!isa) {
        return -1;
    }
    plugin().isa = isa;
    return 0;
}

int es_kernels_tiles() { return ask_for_tiles(); }

int es_kernels_set_wide_from(int64_t tokens) { return set_wide_from(tokens) ? 0 : -1; }

es_prefetch es_kernels_prefetch() { return {plugin().prefetch.level, plugin().prefetch.bytes}; }

int es_kernels_set_prefetch(es_prefetch chosen) {
    const Prefetch prefetch = {chosen.level, chosen.bytes};
    if (!prefetch.is_possible()) {
        return -1;
    }
    plugin().prefetch = prefetch;
    return 0;
}

const char *es_kernels_refusal() { return plugin().refusal.c_str(); }

void es_kernels_want_logits(int64_t n) { wanted_logits = n; }
void *es_kernels_device(int n_threads) {
    lent_threads = std::max(1, n_threads);
    return &plugin().device;
}
void es_kernels_ask_for_weights(int on) { asks_for_weights = on != 0; }
void es_kernels_enable(int on) { plugin().enabled.store(on != 0); }
void es_kernels_map(int fd, int64_t offset, int64_t size) { plugin().file = {fd, offset, size}; }

int64_t es_kernels_n_packed() {
    const std::lock_guard<std::mutex> lock(plugin().mutex);
    return (int64_t)plugin().packed.size();
}

int es_kernels_packed(int64_t i, es_packed *out) {
    const std::lock_guard<std::mutex> lock(plugin().mutex);
    if (i < 0 || (size_t)i >= plugin().packed.size()) {
        return -1;
    }
    *out = plugin().packed[(size_t)i];
    return 0;
}
}
