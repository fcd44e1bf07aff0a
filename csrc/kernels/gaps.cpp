#include "gaps.h"
#include "tensor.h"

#include <algorithm>

namespace edgespec {

namespace {

bool is_masked(uint16_t value) { return value == 0xFC00; } // minus infinity

// The first cell from `j` on, of n, that is visible, or the first that is not.
int64_t find(const uint16_t *mask, int64_t j, int64_t n, bool visible) {
    for (; j + ATTN_BLOCK <= n; j += ATTN_BLOCK) {
        int masked = 0;
        for (int i = 0; i < ATTN_BLOCK; i++) {
            masked += is_masked(mask[j + i]);
        }
        if (masked != (visible ? ATTN_BLOCK : 0)) {
            break;
        }
    }
    while (j < n && is_masked(mask[j]) == visible) {
        j++;
    }
    return j;
}

} // namespace

Gaps::Gaps(const ggml::Tensor *m, int64_t n_tokens) : mask(m), tokens_((size_t)n_tokens) {
    const int64_t n = mask->ne[0];
    for (int64_t t = n_tokens - 1; t >= 0; t--) {
        const uint16_t *row = ggml::at<const uint16_t>(mask, t);
        const int64_t gap = find(row, find(row, 0, n, true), n, false);
        int64_t next = find(row, gap, n, true);
        if (next == n) {
            continue; // a leading part that is masked, as of a sliding window, is no gap
        }
        const int64_t first = gap / ATTN_BLOCK * ATTN_BLOCK;
        std::unique_ptr<int32_t[]> cells(new int32_t[(size_t)(n - first)]);
        int64_t size = 0;
        for (int64_t j = first; j < gap; j++) {
            cells[(size_t)size++] = (int32_t)j;
        }
        for (; next < n; next = find(row, next + 1, n, true)) {
            cells[(size_t)size++] = (int32_t)next;
        }
        any_ = true;
        const Gap *after = branches_.empty() ? nullptr : &branches_.back().gap;
        if (!after || after->n < size || !std::equal(cells.get(), cells.get() + size, after->cells)) {
            branches_.push_back({std::move(cells), {}});
            Branch &branch = branches_.back();
            branch.gap = {first, branch.cells.get(), size};
            after = &branch.gap;
        }
        tokens_[(size_t)t] = after;
    }
}

} // namespace edgespec
