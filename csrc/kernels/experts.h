// Which rows of a product go through which of several matrices beside each other: experts, or heads.
#pragma once

#include "ggml_abi.h"
#include "isa.h"

#include <vector>

namespace edgespec {

// The rows of a product, sorted by their matrix, so that each matrix is read once for all of its rows in the pass.
// Sorted, row i is in slot i; slots of a matrix are cut into tiles, wide ones from a number of rows on.
class Routing {
  public:
    struct Tile {
        int32_t matrix, first, n; // slots
    };

    // For a product of type MUL_MAT_ID, or MUL_MAT with several matrices. Makes room, so that `sort` needs none.
    explicit Routing(const ggml::Tensor *product);

    // Whether it is that of `product` too.
    bool fits(const ggml::Tensor *product) const;

    // That number for one of its products: the largest counts for all.
    void set_wide_from(int64_t rows) { wide_from_ = wide_from_ < rows ? rows : wide_from_; }

    // Read the experts of each row, which are known only once the graph has computed them.
    void sort();

    int64_t n_rows() const { return (int64_t)rows_.size(); }
    int64_t n_tiles() const { return n_tiles_; }
    const Tile &tile(int64_t i) const { return tiles_[(size_t)i]; }
    int32_t row(int64_t slot) const { return rows_[(size_t)slot]; } // of the product
    // Matrices that have rows, and the tiles of the i-th of them.
    int64_t n_active() const { return n_active_; }
    int64_t first_tile(int64_t i) const { return first_tiles_[(size_t)i]; }

    // The matrix of a row, or -1 if there is no such matrix.
    int32_t matrix_of(int64_t row) const;
    // What a row is the product with.
    const float *input(const ggml::Tensor *product, int64_t row) const;

  private:
    const ggml::Tensor *product_;
    int64_t n_matrices_, wide_from_ = LEAST_WIDE;
    std::vector<int32_t> rows_, ends_, first_tiles_; // by slot; by matrix; by active matrix and one more
    std::vector<Tile> tiles_;
    int64_t n_tiles_ = 0, n_active_ = 0;
};

} // namespace edgespec
