// Hidden states that passes leave beside their logits: rows of the residual, copied while a graph runs.
#pragma once

#include "edgespec_kernels.h"
#include "ggml_abi.h"

#include <vector>

namespace edgespec {

// What the passes of one thread leave, and where the next rows go. All tokens of a pass have rows of most layers; after
// the last one a graph has those alone whose logits it computes, which must be the wanted ones.
class HiddenStates {
  public:
    // False for what cannot be: nothing is left then.
    bool ask(const es_hidden &asked);
    void stop() { columns_.clear(); }

    // Whether rows of `t` are wanted; then `to` says where each of its rows goes, null for one that is not.
    bool take(const ggml::Tensor *t, std::vector<float *> &to);

    // Rows that are complete, once all passes are made; -1: some layer left more or fewer.
    int64_t n_rows() const;

  private:
    struct Column {
        char name[64]; // as llama.cpp calls the tensor
        bool of_wanted; // it has rows of the wanted tokens alone
        size_t next = 0; // token, or row
    };
    std::vector<Column> columns_;
    std::vector<int64_t> row_of_; // of each token, -1: not wanted
    size_t n_rows_ = 0;
    int64_t width_ = 0;
    float *out_ = nullptr;
    bool failed_ = false;
};

// Those of this thread.
HiddenStates &hidden_states();

} // namespace edgespec
