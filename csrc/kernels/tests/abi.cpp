// ggml_abi.h against ggml's own headers (EDGESPEC_GGML_INCLUDE): compiled, never run.
#include "../ggml_abi.h"
#include "../weights.h"

#include <ggml-backend.h>
#include <ggml-impl.h>

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
SAME(OP_REPEAT, GGML_OP_REPEAT);
SAME(OP_CONCAT, GGML_OP_CONCAT);
SAME(OP_NORM, GGML_OP_NORM);
SAME(OP_L2_NORM, GGML_OP_L2_NORM);
SAME(OP_SSM_CONV, GGML_OP_SSM_CONV);
SAME(OP_SSM_SCAN, GGML_OP_SSM_SCAN);
SAME(OP_GATED_DELTA_NET, GGML_OP_GATED_DELTA_NET);
SAME(OP_ADD_ID, GGML_OP_ADD_ID);
SAME(OP_SUB, GGML_OP_SUB);
SAME(OP_DIV, GGML_OP_DIV);
SAME(OP_SQR, GGML_OP_SQR);
SAME(OP_SQRT, GGML_OP_SQRT);
SAME(OP_SUM_ROWS, GGML_OP_SUM_ROWS);
SAME(OP_MEAN, GGML_OP_MEAN);
SAME(OP_MUL_MAT_ID, GGML_OP_MUL_MAT_ID);
SAME(OP_CPY, GGML_OP_CPY);
SAME(OP_CONT, GGML_OP_CONT);
SAME(OP_SOFT_MAX, GGML_OP_SOFT_MAX);
SAME(OP_CLAMP, GGML_OP_CLAMP);
SAME(OP_ARGSORT, GGML_OP_ARGSORT);
SAME(OP_FILL, GGML_OP_FILL);
SAME(OP_UNARY, GGML_OP_UNARY);
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
SAME(GLU_REGLU, GGML_GLU_OP_REGLU);
SAME(GLU_SWIGLU_OAI, GGML_GLU_OP_SWIGLU_OAI);
SAME(GLU_GEGLU_QUICK, GGML_GLU_OP_GEGLU_QUICK);
SAME(GLU_SWIGLU_CLAMP, GGML_GLU_OP_SWIGLU_CLAMP);
SAME(UNARY_NEG, GGML_UNARY_OP_NEG);
SAME(UNARY_TANH, GGML_UNARY_OP_TANH);
SAME(UNARY_RELU, GGML_UNARY_OP_RELU);
SAME(UNARY_SIGMOID, GGML_UNARY_OP_SIGMOID);
SAME(UNARY_GELU, GGML_UNARY_OP_GELU);
SAME(UNARY_SILU, GGML_UNARY_OP_SILU);
SAME(UNARY_EXP, GGML_UNARY_OP_EXP);
SAME(UNARY_SOFTPLUS, GGML_UNARY_OP_SOFTPLUS);
SAME(UNARY_GELU_ERF, GGML_UNARY_OP_GELU_ERF);
SAME(SORT_ASCENDING, GGML_SORT_ORDER_ASC);
SAME(SORT_DESCENDING, GGML_SORT_ORDER_DESC);
SAME(ROPE_NORMAL, GGML_ROPE_TYPE_NORMAL);
SAME(ROPE_NEOX, GGML_ROPE_TYPE_NEOX);
SAME(ROPE_MROPE, GGML_ROPE_TYPE_MROPE);
SAME(ROPE_IMROPE, GGML_ROPE_TYPE_IMROPE);
SAME(HINT_HADAMARD, GGML_HINT_SRC0_IS_HADAMARD);
SAME(FLAG_COMPUTE, GGML_TENSOR_FLAG_COMPUTE);
SAME(STATUS_ALLOC_FAILED, GGML_STATUS_ALLOC_FAILED);
SAME(STATUS_FAILED, GGML_STATUS_FAILED);
SAME(STATUS_SUCCESS, GGML_STATUS_SUCCESS);
SAME(STATUS_ABORTED, GGML_STATUS_ABORTED);
SAME(DEVICE_TYPE_ACCEL, GGML_BACKEND_DEVICE_TYPE_ACCEL);
SAME(TYPE_F32, GGML_TYPE_F32);
SAME(TYPE_F16, GGML_TYPE_F16);
SAME(TYPE_Q4_0, GGML_TYPE_Q4_0);
SAME(TYPE_Q8_0, GGML_TYPE_Q8_0);
SAME(TYPE_I8, GGML_TYPE_I8);
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
static_assert(FORMATS[edgespec::NVFP4].ggml_type == GGML_TYPE_NVFP4);
static_assert(FORMATS[edgespec::Q1_0].ggml_type == GGML_TYPE_Q1_0);
static_assert(FORMATS[edgespec::Q2_0].ggml_type == GGML_TYPE_Q2_0);
static_assert(FORMATS[edgespec::IQ4_XS].ggml_type == GGML_TYPE_IQ4_XS);
static_assert(FORMATS[edgespec::TQ1_0].ggml_type == GGML_TYPE_TQ1_0);
static_assert(FORMATS[edgespec::TQ2_0].ggml_type == GGML_TYPE_TQ2_0);
static_assert(FORMATS[edgespec::Q2_K].ggml_type == GGML_TYPE_Q2_K);
static_assert(FORMATS[edgespec::IQ1_S].ggml_type == GGML_TYPE_IQ1_S);
static_assert(FORMATS[edgespec::IQ1_M].ggml_type == GGML_TYPE_IQ1_M);
static_assert(FORMATS[edgespec::IQ2_XXS].ggml_type == GGML_TYPE_IQ2_XXS);
static_assert(FORMATS[edgespec::IQ2_XS].ggml_type == GGML_TYPE_IQ2_XS);
static_assert(FORMATS[edgespec::IQ2_S].ggml_type == GGML_TYPE_IQ2_S);
static_assert(FORMATS[edgespec::IQ3_XXS].ggml_type == GGML_TYPE_IQ3_XXS);
static_assert(FORMATS[edgespec::IQ3_S].ggml_type == GGML_TYPE_IQ3_S);
static_assert(offsetof(ours::TypeTraits, block_size) == offsetof(ggml_type_traits, blck_size));
static_assert(offsetof(ours::TypeTraits, type_size) == offsetof(ggml_type_traits, type_size));
static_assert(offsetof(ours::TypeTraits, to_float) == offsetof(ggml_type_traits, to_float));
static_assert(FORMATS[edgespec::Q3_K].ggml_type == GGML_TYPE_Q3_K);
static_assert(FORMATS[edgespec::Q4_K].ggml_type == GGML_TYPE_Q4_K);
static_assert(FORMATS[edgespec::Q5_K].ggml_type == GGML_TYPE_Q5_K);
static_assert(FORMATS[edgespec::Q6_K].ggml_type == GGML_TYPE_Q6_K);

static_assert(sizeof(ours::DeviceProperties) == sizeof(ggml_backend_dev_props));
static_assert(offsetof(ours::DeviceProperties, type) == offsetof(ggml_backend_dev_props, type));
static_assert(offsetof(ours::DeviceProperties, caps) == offsetof(ggml_backend_dev_props, caps));

#define SAME_OF_GRAPH(OURS, GGML) static_assert(offsetof(ours::Graph, OURS) == offsetof(ggml_cgraph, GGML), #GGML)
static_assert(sizeof(ours::Graph) == sizeof(ggml_cgraph));
static_assert(sizeof(ours::HashSet) == sizeof(ggml_hash_set));
SAME_OF_GRAPH(size, size);
SAME_OF_GRAPH(n_nodes, n_nodes);
SAME_OF_GRAPH(n_leafs, n_leafs);
SAME_OF_GRAPH(nodes, nodes);
SAME_OF_GRAPH(grads, grads);
SAME_OF_GRAPH(grad_accs, grad_accs);
SAME_OF_GRAPH(leafs, leafs);
SAME_OF_GRAPH(use_counts, use_counts);
SAME_OF_GRAPH(visited, visited_hash_set);
SAME_OF_GRAPH(order, order);
SAME_OF_GRAPH(uid, uid);
