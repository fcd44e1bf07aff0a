// Which position of its sequence each cell of a cache holds: learnt from the graphs that fill the cells.
#pragma once

#include "ggml_abi.h"

#include <vector>

namespace edgespec {

// One cache, which several layers may share. llama.cpp alone knows where it puts a token; but each graph says into
// which cells it writes keys, and at which positions it rotates them.
class Cells {
  public:
    static constexpr int32_t UNKNOWN = -1;

    explicit Cells(int64_t n) : positions_((size_t)n, UNKNOWN), marks_((size_t)n) {}

    int64_t size() const { return (int64_t)positions_.size(); }
    // The position in each cell, or UNKNOWN.
    const int32_t *positions() const { return positions_.data(); }

    // A layer's keys lie at `data`. The first layer's are the ones that are looked at below.
    void add_layer(const ggml::Tensor *cache);
    bool has_layer(const void *data) const;

    // The graph that begins writes its tokens into the cells `index`, an input; `positions` nullptr: unknown.
    void write(const ggml::Tensor *index, const int32_t *positions);
    // That graph is done, or was aborted: then nobody knows what is in its cells.
    void settle(bool done);
    // Forget those of the cells whose keys are not the ones that a graph has written: llama.cpp has restored a state,
    // or shifted positions. A bit of `which` for each cell.
    void check(const std::vector<uint64_t> &which);

  private:
    uint64_t mark(int64_t cell) const; // some of the first layer's keys

    std::vector<int32_t> positions_;
    std::vector<uint64_t> marks_;
    std::vector<const void *> layers_;
    size_t stride_ = 0; // bytes from a cell of the first layer to the next
    std::vector<int64_t> written_; // by the graph that runs
};

} // namespace edgespec
