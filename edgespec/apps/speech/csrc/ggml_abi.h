// ggml's functions that these graphs call, and what they take: written from its headers, not copied, so that no header
// is needed to compile. Structures are those of the kernels. tests/abi.cpp compares it with the headers that
// llama-cpp-python installs.
#pragma once

#include "kernels/ggml_abi.h"

namespace edgespec::whisper {

typedef int ggml_type;
enum {
    GGML_TYPE_F32 = ggml::TYPE_F32,
    GGML_TYPE_F16 = ggml::TYPE_F16,
    GGML_TYPE_I8 = ggml::TYPE_I8,
    GGML_TYPE_I32 = ggml::TYPE_I32,
    GGML_TYPE_I64 = ggml::TYPE_I64,
    GGML_STATUS_SUCCESS = ggml::STATUS_SUCCESS,
    GGML_BACKEND_DEVICE_TYPE_CPU = 0,
    GGML_BACKEND_BUFFER_USAGE_WEIGHTS = 1,
};
enum gguf_type : int {
    GGUF_TYPE_UINT32 = 4,
    GGUF_TYPE_INT32 = 5,
    GGUF_TYPE_BOOL = 7,
    GGUF_TYPE_STRING = 8,
    GGUF_TYPE_ARRAY = 9,
};

struct ggml_context;
struct ggml_cgraph;
struct ggml_backend;
struct ggml_gallocr;
struct gguf_context;
typedef ggml::Tensor ggml_tensor;
typedef ggml::TypeTraits ggml_type_traits;
typedef ggml_backend *ggml_backend_t;
typedef ggml::Buffer *ggml_backend_buffer_t;
typedef ggml::BufferType *ggml_backend_buffer_type_t;
typedef ggml::Device *ggml_backend_dev_t;
typedef ggml::Registry *ggml_backend_reg_t;
typedef ggml_gallocr *ggml_gallocr_t;
typedef void (*ggml_to_float_t)(const void *, float *, int64_t);
typedef void (*ggml_backend_set_n_threads_t)(ggml_backend_t, int);

struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};
struct gguf_init_params {
    bool no_alloc;
    ggml_context **ctx;
};

// F(result, name, parameters)
#define ES_GGML_FUNCTIONS(F)                                                                                           \
    F(const char *, ggml_version, ())                                                                                  \
    F(size_t, ggml_tensor_overhead, ())                                                                                \
    F(size_t, ggml_graph_overhead_custom, (size_t, bool))                                                              \
    F(size_t, ggml_row_size, (ggml_type, int64_t))                                                                     \
    F(int64_t, ggml_blck_size, (ggml_type))                                                                            \
    F(const char *, ggml_type_name, (ggml_type))                                                                       \
    F(const char *, ggml_op_desc, (const ggml_tensor *))                                                               \
    F(const ggml_type_traits *, ggml_get_type_traits, (ggml_type))                                                     \
    F(ggml_context *, ggml_init, (ggml_init_params))                                                                   \
    F(void, ggml_free, (ggml_context *))                                                                               \
    F(ggml_tensor *, ggml_new_tensor_1d, (ggml_context *, ggml_type, int64_t))                                         \
    F(ggml_tensor *, ggml_new_tensor_2d, (ggml_context *, ggml_type, int64_t, int64_t))                                \
    F(ggml_tensor *, ggml_new_tensor_3d, (ggml_context *, ggml_type, int64_t, int64_t, int64_t))                       \
    F(void, ggml_set_input, (ggml_tensor *))                                                                           \
    F(void, ggml_set_output, (ggml_tensor *))                                                                          \
    F(ggml_tensor *, ggml_set_name, (ggml_tensor *, const char *))                                                     \
    F(ggml_tensor *, ggml_get_first_tensor, (const ggml_context *))                                                    \
    F(ggml_tensor *, ggml_get_next_tensor, (const ggml_context *, ggml_tensor *))                                      \
    F(ggml_cgraph *, ggml_new_graph_custom, (ggml_context *, size_t, bool))                                            \
    F(void, ggml_build_forward_expand, (ggml_cgraph *, ggml_tensor *))                                                 \
    F(int, ggml_graph_n_nodes, (ggml_cgraph *))                                                                        \
    F(ggml_tensor *, ggml_graph_node, (ggml_cgraph *, int))                                                            \
    F(ggml_tensor *, ggml_add, (ggml_context *, ggml_tensor *, ggml_tensor *))                                         \
    F(ggml_tensor *, ggml_mul, (ggml_context *, ggml_tensor *, ggml_tensor *))                                         \
    F(ggml_tensor *, ggml_mul_mat, (ggml_context *, ggml_tensor *, ggml_tensor *))                                     \
    F(ggml_tensor *, ggml_norm, (ggml_context *, ggml_tensor *, float))                                                \
    F(ggml_tensor *, ggml_gelu_erf, (ggml_context *, ggml_tensor *))                                                   \
    F(ggml_tensor *, ggml_concat, (ggml_context *, ggml_tensor *, ggml_tensor *, int))                                 \
    F(ggml_tensor *, ggml_cont, (ggml_context *, ggml_tensor *))                                                       \
    F(ggml_tensor *, ggml_cpy, (ggml_context *, ggml_tensor *, ggml_tensor *))                                         \
    F(ggml_tensor *, ggml_cast, (ggml_context *, ggml_tensor *, ggml_type))                                            \
    F(ggml_tensor *, ggml_permute, (ggml_context *, ggml_tensor *, int, int, int, int))                                \
    F(ggml_tensor *, ggml_reshape_2d, (ggml_context *, ggml_tensor *, int64_t, int64_t))                               \
    F(ggml_tensor *, ggml_view_2d, (ggml_context *, ggml_tensor *, int64_t, int64_t, size_t, size_t))                  \
    F(ggml_tensor *, ggml_view_3d, (ggml_context *, ggml_tensor *, int64_t, int64_t, int64_t, size_t, size_t, size_t)) \
    F(ggml_tensor *, ggml_get_rows, (ggml_context *, ggml_tensor *, ggml_tensor *))                                    \
    F(ggml_tensor *, ggml_set_rows, (ggml_context *, ggml_tensor *, ggml_tensor *, ggml_tensor *))                     \
    F(ggml_tensor *, ggml_flash_attn_ext,                                                                              \
      (ggml_context *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, float, float, float))               \
    F(ggml_backend_buffer_t, ggml_backend_alloc_ctx_tensors_from_buft, (ggml_context *, ggml_backend_buffer_type_t))   \
    F(void, ggml_backend_buffer_free, (ggml_backend_buffer_t))                                                         \
    F(void, ggml_backend_buffer_set_usage, (ggml_backend_buffer_t, int))                                               \
    F(void, ggml_backend_tensor_set, (ggml_tensor *, const void *, size_t, size_t))                                    \
    F(ggml_backend_buffer_type_t, ggml_backend_cpu_buffer_type, ())                                                    \
    F(ggml_backend_buffer_t, ggml_backend_cpu_buffer_from_ptr, (void *, size_t))                                       \
    F(void, ggml_backend_free, (ggml_backend_t))                                                                       \
    F(bool, ggml_backend_supports_op, (ggml_backend_t, const ggml_tensor *))                                           \
    F(int, ggml_backend_graph_compute, (ggml_backend_t, ggml_cgraph *))                                                \
    F(ggml_backend_t, ggml_backend_dev_init, (ggml_backend_dev_t, const char *))                                       \
    F(ggml_backend_reg_t, ggml_backend_dev_backend_reg, (ggml_backend_dev_t))                                          \
    F(ggml_backend_buffer_type_t, ggml_backend_dev_buffer_type, (ggml_backend_dev_t))                                  \
    F(void *, ggml_backend_reg_get_proc_address, (ggml_backend_reg_t, const char *))                                   \
    F(ggml_backend_dev_t, ggml_backend_dev_by_name, (const char *))                                                    \
    F(ggml_backend_dev_t, ggml_backend_dev_by_type, (int))                                                             \
    F(ggml_gallocr_t, ggml_gallocr_new, (ggml_backend_buffer_type_t))                                                  \
    F(void, ggml_gallocr_free, (ggml_gallocr_t))                                                                       \
    F(bool, ggml_gallocr_alloc_graph, (ggml_gallocr_t, ggml_cgraph *))                                                 \
    F(bool, ggml_gallocr_reserve, (ggml_gallocr_t, ggml_cgraph *))                                                     \
    F(size_t, ggml_gallocr_get_buffer_size, (ggml_gallocr_t, int))                                                     \
    F(gguf_context *, gguf_init_from_file, (const char *, gguf_init_params))                                           \
    F(void, gguf_free, (gguf_context *))                                                                               \
    F(int64_t, gguf_find_key, (const gguf_context *, const char *))                                                    \
    F(gguf_type, gguf_get_kv_type, (const gguf_context *, int64_t))                                                    \
    F(gguf_type, gguf_get_arr_type, (const gguf_context *, int64_t))                                                   \
    F(size_t, gguf_get_arr_n, (const gguf_context *, int64_t))                                                         \
    F(const void *, gguf_get_arr_data, (const gguf_context *, int64_t))                                                \
    F(uint32_t, gguf_get_val_u32, (const gguf_context *, int64_t))                                                     \
    F(bool, gguf_get_val_bool, (const gguf_context *, int64_t))                                                        \
    F(const char *, gguf_get_val_str, (const gguf_context *, int64_t))                                                 \
    F(int64_t, gguf_find_tensor, (const gguf_context *, const char *))                                                 \
    F(size_t, gguf_get_tensor_offset, (const gguf_context *, int64_t))                                                 \
    F(const int64_t *, gguf_get_tensor_ne, (const gguf_context *, int64_t))                                            \
    F(ggml_type, gguf_get_tensor_type, (const gguf_context *, int64_t))                                                \
    F(size_t, gguf_get_data_offset, (const gguf_context *))

} // namespace edgespec::whisper
