#include "model_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace edgespec::whisper {

namespace {

constexpr uint32_t MOST_LAYERS = 256, MOST_STATE = 8192, MOST_HEAD = 256;
constexpr char ARCHITECTURE[] = "general.architecture";

} // namespace

ModelFile::ModelFile(const GgmlApi &api, const std::string &path) : api_(api) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info = {};
    if (file < 0 || fstat(file, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < 1) {
        const std::string reason = file < 0 ? strerror(errno) : "not a file with contents";
        if (file >= 0) {
            ::close(file);
        }
        throw Failure(reason);
    }
    size_ = (size_t)info.st_size;
    void *const mapped = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    ::close(file);
    if (mapped == MAP_FAILED) {
        throw Failure("it cannot be mapped into memory");
    }
    mapped_ = (char *)mapped;
    gguf_ = api_.gguf_init_from_file(path.c_str(), {true, nullptr});
    try {
        if (!gguf_) {
            throw Failure("no GGUF file, or a damaged one");
        }
        read_dims();
        read_alignment_heads();
    } catch (...) {
        close();
        throw;
    }
}

ModelFile::~ModelFile() { close(); }

void ModelFile::close() {
    if (gguf_) {
        api_.gguf_free(gguf_);
    }
    munmap(mapped_, size_);
}

void ModelFile::forget_pages() const { madvise(mapped_, size_, MADV_DONTNEED); }

uint32_t ModelFile::number(const char *key, uint32_t low, uint32_t high) const {
    const int64_t id = api_.gguf_find_key(gguf_, key);
    if (id < 0 || api_.gguf_get_kv_type(gguf_, id) != GGUF_TYPE_UINT32) {
        throw Failure(std::string(key) + " is missing, or no 32-bit number");
    }
    const uint32_t value = api_.gguf_get_val_u32(gguf_, id);
    if (value < low || value > high) {
        throw Failure(std::string(key) + " is " + std::to_string(value) + ", which cannot be");
    }
    return value;
}

void ModelFile::read_dims() {
    const int64_t architecture = api_.gguf_find_key(gguf_, ARCHITECTURE);
    if (architecture < 0 || api_.gguf_get_kv_type(gguf_, architecture) != GGUF_TYPE_STRING ||
        strcmp(api_.gguf_get_val_str(gguf_, architecture), "whisper") != 0) {
        throw Failure("its architecture is not whisper: a text model?");
    }
    const int64_t multilingual = api_.gguf_find_key(gguf_, "whisper.multilingual");
    dims.is_multilingual = multilingual >= 0 && api_.gguf_get_kv_type(gguf_, multilingual) == GGUF_TYPE_BOOL &&
                           api_.gguf_get_val_bool(gguf_, multilingual);
    dims.n_mels = (int32_t)number("whisper.n_mels", 1, 1024);
    dims.n_vocab = (int32_t)number("whisper.vocab_size", 2, 1 << 20);
    dims.n_audio_ctx = (int32_t)number("whisper.encoder.context_length", 1, 1 << 14);
    dims.n_audio_state = (int32_t)number("whisper.encoder.embedding_length", 32, MOST_STATE);
    dims.n_audio_head = (int32_t)number("whisper.encoder.attention.head_count", 1, MOST_HEAD);
    dims.n_audio_layer = (int32_t)number("whisper.encoder.block_count", 0, MOST_LAYERS);
    dims.n_text_ctx = (int32_t)number("whisper.decoder.context_length", 1, 1 << 14);
    dims.n_text_state = (int32_t)number("whisper.decoder.embedding_length", 32, MOST_STATE);
    dims.n_text_head = (int32_t)number("whisper.decoder.attention.head_count", 1, MOST_HEAD);
    dims.n_text_layer = (int32_t)number("whisper.decoder.block_count", 1, MOST_LAYERS);
    for (const auto &[state, heads] : {std::pair(dims.n_audio_state, dims.n_audio_head),
                                       std::pair(dims.n_text_state, dims.n_text_head)}) {
        if (state % heads || state / heads % 16 || state / heads > 256) {
            throw Failure(std::to_string(heads) + " heads do not divide " + std::to_string(state) +
                          " into widths of whole sixteens up to 256");
        }
    }
}

void ModelFile::read_alignment_heads() {
    const int64_t id = api_.gguf_find_key(gguf_, "whisper.alignment_heads");
    if (id < 0) {
        return;
    }
    const bool is_array = api_.gguf_get_kv_type(gguf_, id) == GGUF_TYPE_ARRAY;
    const size_t n = is_array ? api_.gguf_get_arr_n(gguf_, id) : 0;
    if (is_array && n == 0) {
        return;
    }
    const gguf_type kind = is_array ? api_.gguf_get_arr_type(gguf_, id) : GGUF_TYPE_STRING;
    if ((kind != GGUF_TYPE_INT32 && kind != GGUF_TYPE_UINT32) || n % 2 || n > 4096) {
        throw Failure("whisper.alignment_heads is no list of pairs");
    }
    const char *const data = (const char *)api_.gguf_get_arr_data(gguf_, id);
    alignment_heads.resize(n);
    memcpy(alignment_heads.data(), data, n * sizeof alignment_heads[0]);
    for (size_t i = 0; i < n; i += 2) {
        if (alignment_heads[i] < 0 || alignment_heads[i] >= dims.n_text_layer || alignment_heads[i + 1] < 0 ||
            alignment_heads[i + 1] >= dims.n_text_head) {
            throw Failure("whisper.alignment_heads names a head that the decoder does not have");
        }
    }
    dims.n_alignment_heads = (int32_t)(n / 2);
}

Stored ModelFile::matrix(const std::string &name, int64_t columns, int64_t rows) const {
    const int64_t id = api_.gguf_find_tensor(gguf_, name.c_str());
    if (id < 0) {
        throw Failure("the tensor " + name + " is missing");
    }
    const int64_t *const ne = api_.gguf_get_tensor_ne(gguf_, id);
    if (ne[0] != columns || ne[1] != rows || ne[2] != 1 || ne[3] != 1) {
        throw Failure(name + " has the shape " + std::to_string(ne[0]) + " x " + std::to_string(ne[1]) + ", not " +
                      std::to_string(columns) + " x " + std::to_string(rows));
    }
    Stored stored = {api_.gguf_get_tensor_type(gguf_, id), columns, rows, nullptr, 0};
    if (columns % api_.ggml_blck_size(stored.type)) {
        throw Failure(name + " has rows that are no multiple of its type's blocks");
    }
    stored.size = api_.ggml_row_size(stored.type, columns) * (size_t)rows;
    const size_t data = api_.gguf_get_data_offset(gguf_), offset = api_.gguf_get_tensor_offset(gguf_, id);
    if (data > size_ || offset > size_ - data || stored.size > size_ - data - offset) {
        throw Failure("the file ends within " + name + ": it is truncated");
    }
    if ((data + offset) % sizeof(float)) {
        throw Failure(name + " does not begin at a multiple of four bytes");
    }
    stored.data = mapped_ + data + offset;
    return stored;
}

Stored ModelFile::floats(const std::string &name, int64_t columns, int64_t rows) const {
    const Stored stored = matrix(name, columns, rows);
    if (stored.type != GGML_TYPE_F32) {
        throw Failure(name + " is " + api_.ggml_type_name(stored.type) + ", not f32");
    }
    return stored;
}

} // namespace edgespec::whisper
