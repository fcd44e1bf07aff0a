// A complete backend: its buffer type, its device, and how a graph is shared out between kernels and CPU backend.
#include "node.h"
#include "node_memory.h"
#include "packed.h"
#include "tensor.h"

#include <string.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <set>

namespace edgespec {

using namespace ggml;

namespace {

struct NodeBuffer;

struct Node {
    Ggml ggml = {};
    const Isa *isa = nullptr;
    Prefetch prefetch;
    Device *cpu = nullptr;
    BufferType buffer_type = {};
    Device device = {};
    Registry registry = {};

    std::mutex mutex; // of what follows
    size_t limit = 0, used = 0;
    std::set<NodeBuffer *> buffers;
    int64_t n_freed = 0; // buffers
    int64_t n_run = 0, n_handed_on = 0;
};

Node &node() {
    static Node *const n = new Node; // never destroyed: ggml may free buffers after our destructors ran
    return *n;
}

// ---- buffers ----

struct NodeBuffer {
    std::unique_ptr<NodeMemory> memory;
    size_t size;
};

// What the buffers take, with the node's mutex held: packed copies and all.
size_t held(const Node &n) {
    int64_t more = 0;
    for (const NodeBuffer *buffer : n.buffers) {
        more += buffer->memory->packed_bytes() - buffer->memory->released_bytes();
    }
    return n.used + (size_t)std::max<int64_t>(0, more);
}
size_t left(const Node &n) { return n.limit - std::min(n.limit, held(n)); }

NodeMemory &memory_of(const Buffer *buffer) { return *((NodeBuffer *)buffer->context)->memory; }

void free_buffer(Buffer *buffer) {
    NodeBuffer *const own = (NodeBuffer *)buffer->context;
    {
        const std::lock_guard<std::mutex> lock(node().mutex);
        node().used -= own->size;
        node().buffers.erase(own);
        node().n_freed++;
    }
    delete own;
}
void *get_base(Buffer *buffer) { return memory_of(buffer).base(); }
void clear(Buffer *buffer, uint8_t value) { memory_of(buffer).clear(value); }
void set_tensor(Buffer *buffer, Tensor *t, const void *data, size_t offset, size_t size) {
    memory_of(buffer).change(*node().isa, (char *)t->data + offset, size);
    memcpy((char *)t->data + offset, data, size);
}
void memset_tensor(Buffer *buffer, Tensor *t, uint8_t value, size_t offset, size_t size) {
    memory_of(buffer).change(*node().isa, (char *)t->data + offset, size);
    memset((char *)t->data + offset, value, size);
}
void get_tensor(Buffer *buffer, const Tensor *t, void *data, size_t offset, size_t size) {
    memory_of(buffer).read(*node().isa, (const char *)t->data + offset, data, size);
}
// Of one layout, as ggml has checked.
bool copy_tensor(Buffer *buffer, const Tensor *src, Tensor *dst) {
    if (src->buffer->buft != &node().buffer_type) {
        return false;
    }
    const size_t size = node().ggml.nbytes(src);
    memory_of(src->buffer).show(*node().isa, src->data, size);
    memory_of(buffer).change(*node().isa, dst->data, size);
    memmove(dst->data, src->data, size);
    return true;
}

Buffer *alloc_buffer(BufferType *type, size_t size) {
    Node &n = node();
    {
        const std::lock_guard<std::mutex> lock(n.mutex);
        if (size > left(n)) {
            return nullptr;
        }
        n.used += size;
    }
    NodeBuffer *own = new (std::nothrow) NodeBuffer{NodeMemory::make(size), size};
    if (!own || !own->memory) {
        delete own;
        const std::lock_guard<std::mutex> lock(n.mutex);
        n.used -= size;
        return nullptr;
    }
    BufferInterface iface = {};
    iface.free_buffer = free_buffer;
    iface.get_base = get_base;
    iface.memset_tensor = memset_tensor;
    iface.set_tensor = set_tensor;
    iface.get_tensor = get_tensor;
    iface.cpy_tensor = copy_tensor;
    iface.clear = clear;
    {
        const std::lock_guard<std::mutex> lock(n.mutex);
        n.buffers.insert(own);
    }
    return n.ggml.backend_buffer_init(type, iface, own, size);
}

const char *buffer_type_name(BufferType *) { return "EDGESPEC_NODE"; }
size_t alignment(BufferType *) { return WEIGHTS_ALIGNMENT; }
// Both backends read and write it, except for what is packed: `Sharing` makes that readable first.
bool is_host(BufferType *) { return true; }

// ---- a graph ----

// Who computes each node. ANYBODY: views, which compute nothing.
enum Who : char { ANYBODY, KERNELS, CPU };

NodeMemory *memory_below(const Tensor *t) {
    return t && t->buffer && t->buffer->buft == &node().buffer_type ? &memory_of(t->buffer) : nullptr;
}

bool has_file_layout(const Tensor *w) {
    const Format &format = FORMATS[find_type(w->type)];
    return w->nb[0] == (size_t)format.block_bytes && w->nb[1] == (size_t)row_bytes(find_type(w->type), w->ne[0]) &&
           w->nb[2] == w->nb[1] * (size_t)w->ne[1];
}

// The packed copy of the weights of a product that the kernels can run; nullptr: they cannot.
const void *packed_weights(const Tensor *op) {
    if (!is_packed_matmul(op, node().ggml)) {
        return nullptr;
    }
    const Tensor *const w = op->src[0];
    NodeMemory *const memory = w->op == OP_NONE && has_file_layout(w) ? memory_below(w) : nullptr;
    return memory ? memory->pack(*node().isa, w) : nullptr;
}

class Sharing {
  public:
    Sharing(const std::vector<Tensor *> &nodes) : who_(nodes.size(), CPU) {
        std::vector<bool> is_packed(nodes.size());
        bool any_packed = false;
        for (size_t i = 0; i < nodes.size(); i++) {
            if (const void *packed = packed_weights(nodes[i])) {
                nodes[i]->src[0]->extra = const_cast<void *>(packed);
                who_[i] = KERNELS;
                is_packed[i] = any_packed = true;
            }
        }
        // As in one process: a model without packable weights runs exactly as in llama.cpp. A graph without products
        // (positions that are shifted) could be of either kind of model.
        const auto is_product = [](const Tensor *t) { return t->op == OP_MUL_MAT || t->op == OP_MUL_MAT_ID; };
        any_packed = any_packed || (std::none_of(nodes.begin(), nodes.end(), is_product) && holds_packed());
        for (size_t i = 0; i < nodes.size(); i++) {
            if (is_view(nodes[i])) {
                who_[i] = ANYBODY;
            } else if (!is_packed[i] && any_packed && can_run(nodes[i], node().ggml)) {
                who_[i] = KERNELS;
            }
        }
        for (size_t i = 0; i < nodes.size(); i++) {
            if (who_[i] != ANYBODY) {
                settle(nodes[i], is_packed[i]);
            }
        }
    }
    Who of(size_t i) const { return (Who)who_[i]; }

  private:
    static bool holds_packed() {
        const std::lock_guard<std::mutex> lock(node().mutex);
        return std::any_of(node().buffers.begin(), node().buffers.end(),
                           [](const NodeBuffer *b) { return b->memory->has_packed(); });
    }
    // What an operation reads as ggml lays it out must be there; what it writes is packed no more.
    static void settle(const Tensor *op, bool is_packed) {
        for (int i = is_packed ? 1 : 0; i < 10; i++) {
            NodeMemory *const memory = memory_below(op->src[i]);
            if (memory && memory->has_packed() && op->src[i]->data) {
                memory->show(*node().isa, op->src[i]->data, node().ggml.nbytes(op->src[i]));
            }
        }
        NodeMemory *const memory = memory_below(op);
        if (memory && memory->has_packed() && op->data) {
            memory->change(*node().isa, op->data, node().ggml.nbytes(op));
        }
    }

    std::vector<char> who_;
};

// ---- the backend ----

struct Context {
    Executor executor;
    Backend *cpu;
    int64_t n_freed = 0; // of the node's buffers, as of the last graph
    Backend backend = {};
    Context(const Node &n, Backend *cpu_backend) : executor(*n.isa, n.prefetch, n.ggml), cpu(cpu_backend) {}

    int compute(Graph *graph) {
        const std::vector<Tensor *> nodes(graph->nodes, graph->nodes + graph->n_nodes);
        forget_freed();
        const Sharing sharing(nodes);
        for (size_t first = 0; first < nodes.size();) {
            Who who = ANYBODY;
            size_t end = first;
            int64_t n = 0;
            for (; end < nodes.size(); end++) {
                const Who next = sharing.of(end);
                if (who != ANYBODY && next != ANYBODY && next != who) {
                    break;
                }
                who = who == ANYBODY ? next : who;
                n += next != ANYBODY;
            }
            const int status = who == CPU ? compute_on_cpu(graph, first, end)
                                          : executor.compute({&nodes[first], &nodes[first] + (end - first)});
            if (status != STATUS_SUCCESS) {
                return status;
            }
            const std::lock_guard<std::mutex> lock(node().mutex);
            (who == CPU ? node().n_handed_on : node().n_run) += n;
            first = end;
        }
        return STATUS_SUCCESS;
    }

  private:
    // Nodes [first, end) of a graph, as ggml_graph_view makes one.
    int compute_on_cpu(const Graph *graph, size_t first, size_t end) {
        Graph view = *graph;
        view.size = view.n_leafs = 0;
        view.n_nodes = (int32_t)(end - first);
        view.nodes = graph->nodes + first;
        view.grads = view.grad_accs = view.leafs = nullptr;
        view.uid = 0;
        return cpu->graph_compute(cpu, &view);
    }
    // Another cache may lie now where a freed one was.
    void forget_freed() {
        const std::lock_guard<std::mutex> lock(node().mutex);
        if (n_freed != node().n_freed) {
            n_freed = node().n_freed;
            executor.forget_caches();
        }
    }
};

const char *name(Backend *) { return "edgespec"; }
void free_backend(Backend *backend) {
    Context *const context = (Context *)backend->context;
    context->cpu->free(context->cpu);
    delete context;
}
int graph_compute(Backend *backend, Graph *graph) {
    try {
        return ((Context *)backend->context)->compute(graph);
    } catch (const std::bad_alloc &) {
        return STATUS_ALLOC_FAILED;
    }
}
void set_n_threads(Backend *backend, int n) {
    Context &context = *(Context *)backend->context;
    context.executor.n_threads = std::max(1, n);
    Registry *const registry = node().cpu->reg;
    const auto of_cpu = (void (*)(Backend *, int))registry->get_proc_address(registry, "ggml_backend_set_n_threads");
    if (of_cpu) {
        of_cpu(context.cpu, std::max(1, n));
    }
}

Backend *init_backend(Device *device, const char *) {
    static uint8_t guid[16] = {0x0c, 0x6e, 0x0e, 0x2a, 0x77, 0x1d, 0x4b, 0x5c, 0x8e, 0x41, 0xb2, 0x9f, 0x30, 0xd4, 0x66, 0x13};
    Node &n = node();
    Backend *const cpu = n.cpu->init_backend(n.cpu, nullptr);
    Context *const context = cpu ? new (std::nothrow) Context(n, cpu) : nullptr;
    if (!context) {
        if (cpu) {
            cpu->free(cpu);
        }
        return nullptr;
    }
    Backend &backend = context->backend;
    backend.guid = guid;
    backend.get_name = name;
    backend.free = free_backend;
    backend.graph_compute = graph_compute;
    backend.device = device;
    backend.context = context;
    return &backend;
}

// ---- the device ----

const char *device_name(Device *) { return "edgespec"; }
const char *device_description(Device *) { return node().isa->name; }
void device_memory(Device *, size_t *free, size_t *total) {
    const std::lock_guard<std::mutex> lock(node().mutex);
    *total = node().limit;
    *free = left(node());
}
int device_type(Device *) { return DEVICE_TYPE_ACCEL; }
void device_properties(Device *device, DeviceProperties *properties) {
    *properties = {};
    properties->name = device_name(device);
    properties->description = device_description(device);
    properties->type = DEVICE_TYPE_ACCEL;
    device_memory(device, &properties->memory_free, &properties->memory_total);
}
BufferType *device_buffer_type(Device *) { return &node().buffer_type; }
bool supports_op(Device *, const Tensor *op) { return node().cpu->supports_op(node().cpu, op); }
bool supports_buffer_type(Device *, BufferType *type) { return type == &node().buffer_type; }

const char *registry_name(Registry *) { return "edgespec-node"; }
size_t device_count(Registry *) { return 1; }
Device *get_device(Registry *, size_t) { return &node().device; }
void *proc_address(Registry *, const char *function) {
    return !strcmp(function, "ggml_backend_set_n_threads") ? (void *)set_n_threads : nullptr;
}

} // namespace

Device *node_device(const Isa &isa, Prefetch prefetch, const Ggml &ggml, Device *cpu, size_t memory) {
    Node &n = node();
    n.ggml = ggml;
    n.ggml.packed = &n.buffer_type;
    n.isa = &isa;
    n.prefetch = prefetch;
    n.cpu = cpu;
    n.limit = memory;
    // No get_alloc_size: places are as large as ggml's rules say.
    n.buffer_type = {buffer_type_name, alloc_buffer, alignment, nullptr, nullptr, is_host, &n.device, nullptr};
    n.device = {};
    n.device.get_name = device_name;
    n.device.get_description = device_description;
    n.device.get_memory = device_memory;
    n.device.get_type = device_type;
    n.device.get_props = device_properties;
    n.device.init_backend = init_backend;
    n.device.get_buffer_type = device_buffer_type;
    n.device.supports_op = supports_op;
    n.device.supports_buft = supports_buffer_type;
    n.device.reg = &n.registry;
    n.registry = {API_VERSION, registry_name, device_count, get_device, proc_address, nullptr};
    return &n.device;
}

NodeFacts node_facts() {
    Node &n = node();
    const std::lock_guard<std::mutex> lock(n.mutex);
    NodeFacts facts = {n.limit, held(n), 0, 0, n.n_run, n.n_handed_on};
    for (const NodeBuffer *buffer : n.buffers) {
        facts.n_packed += buffer->memory->n_packed();
        facts.packed_bytes += buffer->memory->packed_bytes();
    }
    return facts;
}

} // namespace edgespec
