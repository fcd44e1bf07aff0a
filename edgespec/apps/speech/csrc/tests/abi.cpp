// ggml_abi.h against ggml's own headers (EDGESPEC_GGML_INCLUDE): compiled, never run.
#include "../ggml_abi.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>

#include <type_traits>

namespace ours = edgespec::whisper;

// Values that are passed in the same way: pointers, numbers of one size and kind, structures of one size.
template <class A, class B>
constexpr bool ALIKE = std::is_same_v<A, B> || (std::is_pointer_v<A> && std::is_pointer_v<B>) ||
                       (sizeof(A) == sizeof(B) && std::is_enum_v<B> && (std::is_enum_v<A> || std::is_same_v<A, int>)) ||
                       (std::is_class_v<A> && std::is_class_v<B> && sizeof(A) == sizeof(B));

template <class A, class B> struct SameCall : std::false_type {};
template <class A, class... As, class B, class... Bs> struct SameCall<A (*)(As...), B (*)(Bs...)> {
    template <class... Xs> struct List {};
    template <class L, class M> struct All : std::false_type {};
    template <class... Xs, class... Ys> struct All<List<Xs...>, List<Ys...>> {
        static constexpr bool of() {
            if constexpr (sizeof...(Xs) == sizeof...(Ys)) {
                return (ALIKE<Xs, Ys> && ...);
            }
            return false;
        }
    };
    static constexpr bool result() {
        if constexpr (std::is_void_v<A> || std::is_void_v<B>) {
            return std::is_same_v<A, B>;
        } else {
            return ALIKE<A, B>;
        }
    }
    static constexpr bool value = result() && All<List<As...>, List<Bs...>>::of();
};

namespace edgespec::whisper {
struct Table {
#define OURS(RESULT, NAME, PARAMETERS) RESULT(*NAME) PARAMETERS;
    ES_GGML_FUNCTIONS(OURS)
#undef OURS
};
} // namespace edgespec::whisper

#define SAME(RESULT, NAME, PARAMETERS)                                                                                 \
    static_assert(SameCall<decltype(ours::Table::NAME), decltype(&::NAME)>::value, #NAME);
ES_GGML_FUNCTIONS(SAME)

static_assert(offsetof(ours::ggml_init_params, no_alloc) == offsetof(::ggml_init_params, no_alloc));
static_assert(offsetof(ours::gguf_init_params, ctx) == offsetof(::gguf_init_params, ctx));

#define SAME_VALUE(NAME) static_assert((int)ours::NAME == (int)::NAME)
SAME_VALUE(GGML_TYPE_F32);
SAME_VALUE(GGML_TYPE_F16);
SAME_VALUE(GGML_TYPE_I8);
SAME_VALUE(GGML_TYPE_I32);
SAME_VALUE(GGML_TYPE_I64);
SAME_VALUE(GGUF_TYPE_UINT32);
SAME_VALUE(GGUF_TYPE_INT32);
SAME_VALUE(GGUF_TYPE_BOOL);
SAME_VALUE(GGUF_TYPE_STRING);
SAME_VALUE(GGUF_TYPE_ARRAY);
SAME_VALUE(GGML_STATUS_SUCCESS);
SAME_VALUE(GGML_BACKEND_DEVICE_TYPE_CPU);
SAME_VALUE(GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
