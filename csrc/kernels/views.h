// What the tokens of a graph see of the cache, in the order of their sequence, however the cells lie.
#pragma once

#include "cells.h"
#include "isa.h"

namespace edgespec {

// A token sees places [start, end): the positions of its sequence. Where these are not known, its cells count from
// the first on, in the order in which they lie. So sums are grouped as if the sequence were alone in a new cache.
// Each block of places has a list of cells, which tokens share that see the same ones there: those of one piece of a
// prompt, branches of a tree on their trunk, sequences that begin alike.
class Views {
  public:
    struct View {
        int64_t start, end;
        size_t first; // in block_ids_: the block of `start`, then those that follow
        int64_t first_block() const { return start / ATTN_BLOCK; }
        int64_t end_block() const { return (end + ATTN_BLOCK - 1) / ATTN_BLOCK; }
    };

    // All tokens see n cells, the first one's first: there is no mask.
    void see_all(int64_t n);

    // `mask` is an input of the graph. `cells` and `positions`, of the n tokens, may be unknown: nullptr.
    void read(const ggml::Tensor *mask, int64_t n, Cells *cells, const int32_t *positions);

    const ggml::Tensor *mask = nullptr;
    const Cells *cells = nullptr;
    int64_t n_seen = 0; // by all tokens, where there is no mask
    bool is_biased = false; // the mask has other values than 0 and minus infinity: they are added
    const View &of(int64_t token) const { return views_[n_seen ? 0 : (size_t)token]; }
    const CellBlock *blocks() const { return blocks_.data(); }
    // Indices into blocks(), from the token's first block on.
    const int32_t *block_ids(int64_t token) const { return block_ids_.data() + of(token).first; }

  private:
    void read_mask(int64_t n);
    void complete_blocks();
    bool order_by_position(const uint64_t *seen, int64_t position, View &view);
    void order_by_index(const uint64_t *seen, View &view);
    int32_t share_block(int64_t token, int64_t block, int from, int to, const int32_t *cells);

    size_t n_words_ = 0;
    std::vector<uint64_t> seen_; // n_words_ for each token: a bit for each cell
    std::vector<int32_t> order_; // the cells of a view, from `start` on
    std::vector<View> views_;
    std::vector<int32_t> block_ids_;
    std::vector<CellBlock> blocks_;
};

} // namespace edgespec
