// ggml_abi.h against ggml's own headers: compiled, never run. Needs ggml.h of a version on the allow-list.
#include "../ggml_abi.h"
#include "../weights.h"

#include <ggml-backend.h>
#include <ggml.h>

namespace ours = edgespec::ggml;

#define SAME_FIELD(FIELD) static_assert(offsetof(ours::Tensor, FIELD) == offsetof(ggml_tensor, FIELD), #FIELD)
static_assert(sizeof(ours::Tensor) == sizeof(ggml_tensor));
SAME_FIELD(type);
SAME_FIELD(buffer);
SAME_FIELD(ne);
SAME_FIELD(nb);
SAME_FIELD(op);
SAME_FIELD(op_params);
SAME_FIELD(flags);
SAME_FIELD(src);
SAME_FIELD(view_src);
SAME_FIELD(view_offs);
SAME_FIELD(data);
SAME_FIELD(name);

#define SAME(OURS, GGML) static_assert((int)ours::OURS == (int)GGML)
SAME(OP_NONE, GGML_OP_NONE);
SAME(OP_ADD, GGML_OP_ADD);
SAME(OP_MUL, GGML_OP_MUL);
SAME(OP_RMS_NORM, GGML_OP_RMS_NORM);
SAME(OP_MUL_MAT, GGML_OP_MUL_MAT);
SAME(OP_SCALE, GGML_OP_SCALE);
SAME(OP_RESHAPE, GGML_OP_RESHAPE);
SAME(OP_VIEW, GGML_OP_VIEW);
SAME(OP_PERMUTE, GGML_OP_PERMUTE);
SAME(OP_TRANSPOSE, GGML_OP_TRANSPOSE);
SAME(OP_GET_ROWS, GGML_OP_GET_ROWS);
SAME(OP_SET_ROWS, GGML_OP_SET_ROWS);
SAME(OP_ROPE, GGML_OP_ROPE);
SAME(OP_FLASH_ATTN_EXT, GGML_OP_FLASH_ATTN_EXT);
SAME(OP_GLU, GGML_OP_GLU);
SAME(GLU_GEGLU, GGML_GLU_OP_GEGLU);
SAME(GLU_SWIGLU, GGML_GLU_OP_SWIGLU);
SAME(ROPE_NORMAL, GGML_ROPE_TYPE_NORMAL);
SAME(ROPE_NEOX, GGML_ROPE_TYPE_NEOX);
SAME(FLAG_COMPUTE, GGML_TENSOR_FLAG_COMPUTE);
SAME(STATUS_ALLOC_FAILED, GGML_STATUS_ALLOC_FAILED);
SAME(STATUS_FAILED, GGML_STATUS_FAILED);
SAME(STATUS_SUCCESS, GGML_STATUS_SUCCESS);
SAME(STATUS_ABORTED, GGML_STATUS_ABORTED);
SAME(DEVICE_TYPE_ACCEL, GGML_BACKEND_DEVICE_TYPE_ACCEL);
SAME(TYPE_F32, GGML_TYPE_F32);
SAME(TYPE_F16, GGML_TYPE_F16);
SAME(TYPE_I32, GGML_TYPE_I32);
SAME(TYPE_I64, GGML_TYPE_I64);

using edgespec::FORMATS;
static_assert(FORMATS[edgespec::Q4_0].ggml_type == GGML_TYPE_Q4_0);
static_assert(FORMATS[edgespec::Q4_1].ggml_type == GGML_TYPE_Q4_1);
static_assert(FORMATS[edgespec::Q5_0].ggml_type == GGML_TYPE_Q5_0);
static_assert(FORMATS[edgespec::Q5_1].ggml_type == GGML_TYPE_Q5_1);
static_assert(FORMATS[edgespec::Q8_0].ggml_type == GGML_TYPE_Q8_0);
static_assert(FORMATS[edgespec::IQ4_NL].ggml_type == GGML_TYPE_IQ4_NL);
static_assert(FORMATS[edgespec::MXFP4].ggml_type == GGML_TYPE_MXFP4);
static_assert(FORMATS[edgespec::F16].ggml_type == GGML_TYPE_F16);
static_assert(FORMATS[edgespec::BF16].ggml_type == GGML_TYPE_BF16);
static_assert(FORMATS[edgespec::Q3_K].ggml_type == GGML_TYPE_Q3_K);
static_assert(FORMATS[edgespec::Q4_K].ggml_type == GGML_TYPE_Q4_K);
static_assert(FORMATS[edgespec::Q5_K].ggml_type == GGML_TYPE_Q5_K);
static_assert(FORMATS[edgespec::Q6_K].ggml_type == GGML_TYPE_Q6_K);

static_assert(sizeof(ours::DeviceProperties) == sizeof(ggml_backend_dev_props));
static_assert(offsetof(ours::DeviceProperties, type) == offsetof(ggml_backend_dev_props, type));
static_assert(offsetof(ours::DeviceProperties, caps) == offsetof(ggml_backend_dev_props, caps));
