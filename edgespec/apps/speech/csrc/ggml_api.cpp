#include "ggml_api.h"

#include <dlfcn.h>
#include <string.h>

#include <algorithm>

namespace edgespec::whisper {

namespace {

// Versions whose binary interface ggml_abi.h describes.
constexpr const char *GGML_VERSIONS[] = {"0.25.3"};
constexpr size_t OBJECT = 32; // what ggml keeps before a tensor

} // namespace

std::string GgmlApi::load() {
    void *const libraries[] = {dlopen("libggml-base.so.0", RTLD_NOLOAD | RTLD_NOW),
                               dlopen("libggml.so.0", RTLD_NOLOAD | RTLD_NOW)};
    std::string problem = libraries[0] && libraries[1] ? "" : "ggml is not loaded";
    const auto find = [&](const char *name) {
        void *symbol = nullptr;
        for (void *library : libraries) {
            symbol = symbol || !library ? symbol : dlsym(library, name);
        }
        if (!symbol && problem.empty()) {
            problem = std::string("ggml has no ") + name;
        }
        return symbol;
    };
#define ES_GGML_FIND(RESULT, NAME, PARAMETERS) NAME = (decltype(NAME))find(#NAME);
    ES_GGML_FUNCTIONS(ES_GGML_FIND)
#undef ES_GGML_FIND
    for (void *library : libraries) {
        if (library) {
            dlclose(library); // it stays loaded: whoever loaded it holds it
        }
    }
    if (!problem.empty()) {
        return problem;
    }
    const auto is_it = [&](const char *version) { return !strcmp(version, ggml_version()); };
    if (!std::any_of(std::begin(GGML_VERSIONS), std::end(GGML_VERSIONS), is_it)) {
        return std::string("ggml ") + ggml_version() + " is not the version that speech was made for (" +
               GGML_VERSIONS[0] + ")";
    }
    if (ggml_tensor_overhead() != sizeof(ggml_tensor) + OBJECT) {
        return "ggml's tensors have another size than speech was made for";
    }
    return "";
}

} // namespace edgespec::whisper
