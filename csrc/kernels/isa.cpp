// One instruction set's kernels, compiled once for each: ES_ISA names the table, ES_ISA_TEXT what users read,
// ES_SECOND_LEVEL the products that prefetch into the second level of cache.
#include "simd.h"

namespace edgespec {
namespace {

#include "quantize.h"
#include "functions.h"
#include "attention.h"
#include "rows.h"
#include "recurrence.h"
#include "limits.h"

} // namespace

#define TABLE(ISA, TEXT, PAIRS, WIDE)                                                                                       \
    {                                                                                                                 \
        TEXT, {LANES, SIGNED_BYTES, PAIRED}, quantize<PAIRS>, {&ES_MATMUL(ISA, 1), &ES_MATMUL(ISA, ES_SECOND_LEVEL)}, \
            WIDE, attend, merge, delta_net, state_scan, rms_norm, norm, l2_norm, add, sub, mul, divide, scale, clamp, square, \
            square_root, negative, exponential, relu, tanh_of, sigmoid, silu, gelu, gelu_erf, reglu, geglu, swiglu,   \
            swiglu_oai, geglu_quick, swiglu_clamp, sum, soft_max, dots, to_half, to_q8, to_q4, hadamard, rope,        \
            read_bytes, peak                                                                                          \
    }

extern const MatmulTable ES_MATMUL(ES_ISA, 1), ES_MATMUL(ES_ISA, ES_SECOND_LEVEL);
extern const Isa ES_ISA;
const Isa ES_ISA = TABLE(ES_ISA, ES_ISA_TEXT, false, nullptr);
#ifdef ES_ISA_BF16
extern const MatmulTable ES_MATMUL(ES_ISA_BF16, 1), ES_MATMUL(ES_ISA_BF16, ES_SECOND_LEVEL);
extern const Isa ES_ISA_BF16;
const Isa ES_ISA_BF16 = TABLE(ES_ISA_BF16, "avx512-bf16", true, nullptr);
#endif
#ifdef ES_ISA_WIDE
extern const WideTable ES_WIDE(ES_ISA_WIDE);
extern const Isa ES_ISA_WIDE;
#ifdef ES_TILES_IN_C
const Isa ES_ISA_WIDE = TABLE(ES_ISA, "avx2-tiles", false, &ES_WIDE(ES_ISA_WIDE));
#else
const Isa ES_ISA_WIDE = TABLE(ES_ISA_BF16, "amx-int8", true, &ES_WIDE(ES_ISA_WIDE));
#endif
#endif

} // namespace edgespec
