// What tokens see of the cache where other branches of a tree lie between: which cells, in which order.
#pragma once

#include "ggml_abi.h"
#include "isa.h"

#include <deque>
#include <memory>
#include <vector>

namespace edgespec {

// The gaps of a mask: one for each token, nullptr where what it sees is contiguous. Tokens of one branch see
// each a cell more than the one before, so they share the list of the last: the others' mask hides the rest.
class Gaps {
  public:
    Gaps(const ggml::Tensor *mask, int64_t n_tokens);
    Gaps(const Gaps &) = delete;

    const ggml::Tensor *mask;
    const Gap *const *tokens() const { return any_ ? tokens_.data() : nullptr; }

  private:
    struct Branch {
        std::unique_ptr<int32_t[]> cells;
        Gap gap;
    };
    bool any_ = false;
    std::vector<const Gap *> tokens_;
    std::deque<Branch> branches_; // which never moves them
};

} // namespace edgespec
