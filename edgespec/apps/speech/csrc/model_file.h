// A Whisper model's GGUF: its sizes, and where its tensors lie. The file is not trusted.
#pragma once

#include "edgespec_whisper.h"
#include "ggml_api.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace edgespec::whisper {

// What is wrong with a file or a request, in one line.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A tensor's numbers in the mapped file.
struct Stored {
    ggml_type type;
    int64_t columns, rows;
    const char *data;
    size_t size;
};

class ModelFile {
  public:
    // Raises Failure if it is no Whisper model, or a damaged one.
    ModelFile(const GgmlApi &api, const std::string &path);
    ~ModelFile();
    ModelFile(const ModelFile &) = delete;
    ModelFile &operator=(const ModelFile &) = delete;

    es_whisper_dims dims = {};
    std::vector<int32_t> alignment_heads; // layer, head, layer, head ...

    // The tensor, which must have this shape.
    Stored matrix(const std::string &name, int64_t columns, int64_t rows) const;
    // Likewise, of float32.
    Stored floats(const std::string &name, int64_t columns, int64_t rows = 1) const;
    // Give the pages that have been read back to the system.
    void forget_pages() const;

  private:
    uint32_t number(const char *key, uint32_t low, uint32_t high) const;
    void read_dims();
    void read_alignment_heads();
    void close();

    const GgmlApi &api_;
    gguf_context *gguf_ = nullptr;
    char *mapped_ = nullptr;
    size_t size_ = 0;
};

} // namespace edgespec::whisper
