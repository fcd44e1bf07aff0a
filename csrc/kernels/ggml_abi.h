// ggml's binary interface, as far as the plugin uses it: written from its headers, not copied.
//
// Versions this was checked against: GGML_VERSIONS in plugin.cpp. There the layout is checked again at run
// time (structure size, names behind the constants), and csrc/kernels/tests/abi.cpp compares it with ggml.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace edgespec::ggml {

enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q4_0 = 2, TYPE_Q8_0 = 8, TYPE_I8 = 24, TYPE_I32 = 26, TYPE_I64 = 27 };

enum Op {
    OP_NONE = 0,
    OP_ADD = 2,
    OP_ADD_ID = 3,
    OP_SUB = 6,
    OP_MUL = 7,
    OP_DIV = 8,
    OP_SQR = 9,
    OP_SQRT = 10,
    OP_SUM_ROWS = 15,
    OP_MEAN = 17,
    OP_REPEAT = 20,
    OP_CONCAT = 22,
    OP_NORM = 24,
    OP_RMS_NORM = 25,
    OP_L2_NORM = 28,
    OP_MUL_MAT = 29,
    OP_MUL_MAT_ID = 30,
    OP_SCALE = 32,
    OP_CPY = 34,
    OP_CONT = 35,
    OP_RESHAPE = 36,
    OP_VIEW = 37,
    OP_PERMUTE = 38,
    OP_TRANSPOSE = 39,
    OP_GET_ROWS = 40,
    OP_SET_ROWS = 42,
    OP_SOFT_MAX = 46,
    OP_ROPE = 48,
    OP_CLAMP = 50,
    OP_ARGSORT = 69,
    OP_FILL = 73,
    OP_FLASH_ATTN_EXT = 74,
    OP_SSM_CONV = 76,
    OP_SSM_SCAN = 77,
    OP_GATED_DELTA_NET = 86,
    OP_UNARY = 91,
    OP_GLU = 100,
};
enum {
    GLU_REGLU = 0,
    GLU_GEGLU = 1,
    GLU_SWIGLU = 2,
    GLU_SWIGLU_OAI = 3,
    GLU_GEGLU_QUICK = 5,
    GLU_SWIGLU_CLAMP = 6,
};
enum {
    UNARY_NEG = 2,
    UNARY_TANH = 4,
    UNARY_RELU = 6,
    UNARY_SIGMOID = 7,
    UNARY_GELU = 8,
    UNARY_SILU = 10,
    UNARY_EXP = 13,
    UNARY_SOFTPLUS = 15,
    UNARY_GELU_ERF = 16,
};
enum { SORT_ASCENDING = 0, SORT_DESCENDING = 1 };
enum { ROPE_NORMAL = 0, ROPE_NEOX = 2, ROPE_MROPE = 8, ROPE_IMROPE = 40 };
enum { HINT_HADAMARD = 1 }; // of a product, op_params[1]: its matrix is one over sqrt(n)
enum { FLAG_COMPUTE = 16 };
enum { STATUS_ALLOC_FAILED = -2, STATUS_FAILED = -1, STATUS_SUCCESS = 0, STATUS_ABORTED = 1 };
enum { DEVICE_TYPE_ACCEL = 3 };

struct Buffer;
struct BufferType;
struct Device;
struct Registry;

struct Tensor {
    int32_t type;
    Buffer *buffer;
    int64_t ne[4]; // elements
    size_t nb[4];  // bytes from one to the next
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    Tensor *src[10];
    Tensor *view_src;
    size_t view_offs;
    void *data;
    char name[64];
    void *extra;
    char padding[8];
};

struct TypeTraits {
    const char *name;
    int64_t block_size, interleave;
    size_t type_size;
    bool is_quantized;
    void (*to_float)(const void *, float *, int64_t);
};

struct HashSet {
    size_t size;
    uint32_t *used;
    Tensor **keys;
};

struct Graph {
    int32_t size, n_nodes, n_leafs;
    Tensor **nodes, **grads, **grad_accs, **leafs;
    int32_t *use_counts;
    HashSet visited;
    int32_t order;
    uint64_t uid;
};

struct BufferType {
    const char *(*get_name)(BufferType *);
    Buffer *(*alloc_buffer)(BufferType *, size_t);
    size_t (*get_alignment)(BufferType *);
    size_t (*get_max_size)(BufferType *);
    size_t (*get_alloc_size)(BufferType *, const Tensor *);
    bool (*is_host)(BufferType *);
    Device *device;
    void *context;
};

struct BufferInterface {
    void (*free_buffer)(Buffer *);
    void *(*get_base)(Buffer *);
    int (*init_tensor)(Buffer *, Tensor *);
    void (*memset_tensor)(Buffer *, Tensor *, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(Buffer *, Tensor *, const void *data, size_t offset, size_t size);
    void (*get_tensor)(Buffer *, const Tensor *, void *data, size_t offset, size_t size);
    void (*set_tensor_2d)(Buffer *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(Buffer *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(Buffer *, const Tensor *src, Tensor *dst);
    void (*clear)(Buffer *, uint8_t value);
    void (*reset)(Buffer *);
};

struct Buffer {
    BufferInterface iface;
    BufferType *buft;
    void *context;
    size_t size;
    int32_t usage;
};

struct Backend {
    uint8_t *guid; // 16 bytes
    const char *(*get_name)(Backend *);
    void (*free)(Backend *);
    void *async_and_plans[10]; // set/get_tensor_async, their 2d forms, cpy_tensor_async, synchronize, graph_plan_*
    int (*graph_compute)(Backend *, Graph *);
    void *events_and_optimize[3]; // event_record, event_wait, graph_optimize
    Device *device;
    void *context;
};

struct DeviceProperties {
    const char *name, *description;
    size_t memory_free, memory_total;
    int32_t type;
    const char *device_id;
    struct {
        bool async, host_buffer, buffer_from_host_ptr, events, mmap_support;
    } caps;
};

struct Device {
    const char *(*get_name)(Device *);
    const char *(*get_description)(Device *);
    void (*get_memory)(Device *, size_t *free, size_t *total);
    int (*get_type)(Device *);
    void (*get_props)(Device *, DeviceProperties *);
    Backend *(*init_backend)(Device *, const char *params);
    BufferType *(*get_buffer_type)(Device *);
    BufferType *(*get_host_buffer_type)(Device *);
    Buffer *(*buffer_from_host_ptr)(Device *, void *, size_t, size_t);
    bool (*supports_op)(Device *, const Tensor *);
    bool (*supports_buft)(Device *, BufferType *);
    bool (*offload_op)(Device *, const Tensor *);
    void *(*event_new)(Device *);
    void (*event_free)(Device *, void *);
    void (*event_synchronize)(Device *, void *);
    Registry *reg;
    void *context;
};

struct Registry {
    int32_t api_version;
    const char *(*get_name)(Registry *);
    size_t (*get_device_count)(Registry *);
    Device *(*get_device)(Registry *, size_t);
    void *(*get_proc_address)(Registry *, const char *);
    void *context;
};
constexpr int API_VERSION = 2;

} // namespace edgespec::ggml
