// Which cells of a KV cache the sequences hold, and what each token of a pass sees: bookkeeping without ggml.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace edgespec::whisper {

// Tokens of one sequence in a pass, as in es_whisper_part.
struct Part {
    int32_t sequence;
    const int32_t *tokens;
    size_t n_tokens, n_logits;
    const int32_t *parents;
    size_t n_parents;
};

// A token of a pass: where it lies, at which position, and the cells that it sees, its own last.
struct Placed {
    int32_t sequence, token, position, cell;
    bool wants_logits;
    std::vector<int32_t> sees;
};

// Sequences that share cells where one was made from another: no keys are copied. A cell holds one position.
class Sequences {
  public:
    Sequences(int32_t n_sequences, int32_t n_cells, int32_t n_ctx);

    int32_t n_past(int32_t sequence) const; // -1: there is no such sequence
    // Keep the first n_keep tokens; false if there are fewer.
    bool rewind(int32_t sequence, int32_t n_keep);
    // Sequence i goes on from what sources[i] holds; false, and nothing changes, if there is no such one.
    bool reorder(const int32_t *sources, size_t n);
    // Append parts; returns why that is not possible, with nothing changed, or nullptr. Tokens come part by part.
    const char *append(const std::vector<Part> &parts, std::vector<Placed> &placed);
    // Take the parts of the last `append` back, as after a pass that failed.
    void undo(const std::vector<Part> &parts);
    // After a pass: only the trunks of trees stay.
    void keep_trunks(const std::vector<Part> &parts);

    bool is_consistent() const; // every cell has as many users as sequences hold it

  private:
    const char *check(const std::vector<Part> &parts) const;
    void release(int32_t cell);
    int32_t take();
    bool has(int32_t sequence) const { return sequence >= 0 && (size_t)sequence < held_.size(); }

    int32_t n_ctx_;
    std::vector<std::vector<int32_t>> held_; // the cells of each sequence, by position; nodes of a tree follow
    std::vector<int32_t> users_;             // of each cell
    std::vector<int32_t> n_before_;          // of each sequence, tokens before the last `append`
};

} // namespace edgespec::whisper
