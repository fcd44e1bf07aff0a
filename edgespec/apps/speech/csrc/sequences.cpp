#include "sequences.h"

#include <algorithm>

namespace edgespec::whisper {

Sequences::Sequences(int32_t n_sequences, int32_t n_cells, int32_t n_ctx)
    : n_ctx_(n_ctx), held_((size_t)n_sequences), users_((size_t)n_cells), n_before_((size_t)n_sequences) {}

int32_t Sequences::n_past(int32_t sequence) const {
    return has(sequence) ? (int32_t)held_[(size_t)sequence].size() : -1;
}

void Sequences::release(int32_t cell) { users_[(size_t)cell]--; }

// The lowest free cell, so that the cells in use stay few and low; -1: none.
int32_t Sequences::take() {
    const auto free = std::find(users_.begin(), users_.end(), 0);
    if (free == users_.end()) {
        return -1;
    }
    *free = 1;
    return (int32_t)(free - users_.begin());
}

bool Sequences::rewind(int32_t sequence, int32_t n_keep) {
    if (!has(sequence) || n_keep < 0 || n_keep > n_past(sequence)) {
        return false;
    }
    std::vector<int32_t> &held = held_[(size_t)sequence];
    for (size_t i = (size_t)n_keep; i < held.size(); i++) {
        release(held[i]);
    }
    held.resize((size_t)n_keep);
    return true;
}

bool Sequences::reorder(const int32_t *sources, size_t n) {
    if (n > held_.size() || std::any_of(sources, sources + n, [this](int32_t s) { return !has(s); })) {
        return false;
    }
    std::vector<std::vector<int32_t>> next(held_.size());
    for (size_t i = 0; i < n; i++) {
        next[i] = held_[(size_t)sources[i]];
        for (const int32_t cell : next[i]) {
            users_[(size_t)cell]++;
        }
    }
    for (const std::vector<int32_t> &held : held_) {
        for (const int32_t cell : held) {
            release(cell);
        }
    }
    held_ = std::move(next);
    return true;
}

const char *Sequences::check(const std::vector<Part> &parts) const {
    std::vector<bool> met(held_.size());
    size_t n_new = 0;
    for (const Part &part : parts) {
        if (!has(part.sequence)) {
            return "no such sequence";
        }
        if (met[(size_t)part.sequence]) {
            return "a sequence has two parts in one pass";
        }
        met[(size_t)part.sequence] = true;
        if (part.n_tokens < 1 || part.n_logits > part.n_tokens || part.n_parents > part.n_tokens) {
            return "a part has no tokens, or fewer than logits or nodes";
        }
        if ((size_t)n_past(part.sequence) + part.n_tokens - part.n_parents > (size_t)n_ctx_) {
            return "the sequence is longer than the model's context";
        }
        for (size_t i = 0; i < part.n_parents; i++) {
            if (part.parents[i] < -1 || part.parents[i] >= (int64_t)i) {
                return "a node of the tree comes before its parent";
            }
        }
        n_new += part.n_tokens;
    }
    const size_t n_free = (size_t)std::count(users_.begin(), users_.end(), 0);
    return n_new > n_free ? "the cache is full" : nullptr;
}

const char *Sequences::append(const std::vector<Part> &parts, std::vector<Placed> &placed) {
    if (const char *problem = check(parts)) {
        return problem;
    }
    placed.clear();
    for (const Part &part : parts) {
        std::vector<int32_t> &held = held_[(size_t)part.sequence];
        n_before_[(size_t)part.sequence] = (int32_t)held.size();
        const size_t n_chain = part.n_tokens - part.n_parents, first_node = placed.size() + n_chain;
        for (size_t i = 0; i < part.n_tokens; i++) {
            Placed token = {part.sequence, part.tokens[i], 0, take(), i + part.n_logits >= part.n_tokens, {}};
            const int32_t parent = i < n_chain ? -1 : part.parents[i - n_chain];
            if (parent >= 0) {
                token.sees = placed[first_node + (size_t)parent].sees;
            } else {
                const size_t n_seen = i < n_chain ? held.size() : held.size() - (i - n_chain);
                token.sees.assign(held.begin(), held.begin() + (int64_t)n_seen);
            }
            token.position = (int32_t)token.sees.size();
            token.sees.push_back(token.cell);
            held.push_back(token.cell);
            placed.push_back(std::move(token));
        }
    }
    for (const Placed &token : placed) {
        if (token.position >= n_ctx_) {
            undo(parts);
            return "the sequence is longer than the model's context";
        }
    }
    return nullptr;
}

void Sequences::undo(const std::vector<Part> &parts) {
    for (const Part &part : parts) {
        rewind(part.sequence, n_before_[(size_t)part.sequence]);
    }
}

void Sequences::keep_trunks(const std::vector<Part> &parts) {
    for (const Part &part : parts) {
        std::vector<int32_t> &held = held_[(size_t)part.sequence];
        const size_t first_node = held.size() - part.n_parents;
        size_t n = 0; // nodes of the trunk: each follows the one before it
        while (n < part.n_parents && part.parents[n] == (int32_t)n - 1) {
            n++;
        }
        for (size_t i = n; i < part.n_parents; i++) {
            release(held[first_node + i]);
        }
        held.resize(first_node + n);
    }
}

bool Sequences::is_consistent() const {
    std::vector<int32_t> users(users_.size());
    for (const std::vector<int32_t> &held : held_) {
        for (const int32_t cell : held) {
            if (cell < 0 || (size_t)cell >= users.size()) {
                return false;
            }
            users[(size_t)cell]++;
        }
    }
    return users == users_;
}

} // namespace edgespec::whisper
