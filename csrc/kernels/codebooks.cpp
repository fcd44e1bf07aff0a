#include "codebooks.h"

#include "ggml_abi.h"

#include <dlfcn.h>
#include <math.h>

#include <algorithm>
#include <vector>

namespace edgespec {
namespace {

using ggml::TypeTraits;

// What the entries of a table are made of, in units in which all are integers, by level.
struct Magnitudes {
    float unit;
    std::vector<int> levels;
    int entries;
};

Magnitudes magnitudes(Type type) {
    switch (type) {
    case IQ2_XXS:
        return {8, {8, 25, 43}, 256};
    case IQ2_XS:
        return {8, {8, 25, 43}, 512};
    case IQ2_S:
        return {8, {8, 25, 43}, 1024};
    case IQ3_XXS:
        return {4, {4, 12, 20, 28, 36, 44, 52, 62}, 256};
    case IQ3_S:
        return {1, {1, 3, 5, 7, 9, 11, 13, 15}, 512};
    default: // IQ1_S, with an eighth more
        return {8, {-7, 1, 9}, 2048};
    }
}

// Let ggml turn blocks with all entries, without signs, into floats.
void learn(Type type, const TypeTraits &traits, Codebook &book) {
    const Magnitudes of_type = magnitudes(type);
    const int columns = is_iq3(type) ? 4 : 8, in_block = 256 / columns;
    for (int first = 0; first < of_type.entries; first += in_block) {
        std::vector<uint8_t> block((size_t)FORMATS[type].block_bytes);
        float values[256];
        block[1] = 0x3C; // an F16 scale of 1
        for (int s = 0; s < 8; s++) {
            CodedStep step = {};
            for (int i = 0; i < in_block / 8; i++) {
                step.index[i] = (uint16_t)(first + s * in_block / 8 + i);
            }
            add_step(type, step, s, block.data());
        }
        traits.to_float(block.data(), values, 256);
        for (int i = 0; i < 256; i++) {
            const auto &levels = of_type.levels;
            const auto level = std::find(levels.begin(), levels.end(), lroundf(values[i] * of_type.unit));
            if (level == levels.end() || *level != values[i] * of_type.unit) {
                return;
            }
            book.levels[first + i / columns][i % columns] = (uint8_t)(level - levels.begin());
        }
    }
    for (int i = 0; i < of_type.entries; i++) {
        book.index_of[book.key(book.levels[i], columns)] = (uint16_t)i;
    }
    book.is_known = true;
    for (int i = 0; i < of_type.entries; i++) { // no two of them are alike
        book.is_known = book.is_known && book.index_of[book.key(book.levels[i], columns)] == i;
    }
}

const Codebook *learn_all() {
    Codebook *const books = new Codebook[N_TYPES](); // never destroyed, as the plugin's other state
    void *const base = dlopen("libggml-base.so.0", RTLD_NOLOAD | RTLD_NOW);
    const auto traits = base ? (const TypeTraits *(*)(int))dlsym(base, "ggml_get_type_traits") : nullptr;
    for (const Type type : {IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S}) {
        const TypeTraits *const of_type = traits ? traits(FORMATS[type].ggml_type) : nullptr;
        if (of_type && of_type->to_float && of_type->block_size == FORMATS[type].block &&
            of_type->type_size == (size_t)FORMATS[type].block_bytes) {
            learn(type, *of_type, books[type]);
        }
    }
    if (base) {
        dlclose(base);
    }
    return books;
}

} // namespace

const Codebook &codebook(Type type) {
    static const Codebook *const books = learn_all();
    return books[type == IQ1_M ? IQ1_S : type];
}

} // namespace edgespec
