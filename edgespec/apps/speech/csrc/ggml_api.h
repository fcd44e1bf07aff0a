// ggml's public functions as a table, looked up in the libraries that llama-cpp-python has loaded: nothing of ggml is
// linked, so that there is one ggml in the process, with the plugin of csrc/kernels in its registry.
#pragma once

#include "ggml_abi.h"

#include <string>

namespace edgespec::whisper {

struct GgmlApi {
#define ES_GGML_FIELD(RESULT, NAME, PARAMETERS) RESULT(*NAME) PARAMETERS = nullptr;
    ES_GGML_FUNCTIONS(ES_GGML_FIELD)
#undef ES_GGML_FIELD

    // Look all of them up; returns why that is not possible, or nothing.
    std::string load();
};

} // namespace edgespec::whisper
