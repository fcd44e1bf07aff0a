// Sequences against a slow oracle that keeps each one's tokens as a list: appending, trees, taking back, sharing.
#include "../sequences.h"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>

using namespace edgespec::whisper;

namespace {

constexpr int32_t SEQUENCES = 4, CELLS = 60, CONTEXT = 12;

uint32_t state = 1;
int32_t below(int32_t n) { return (int32_t)((state = state * 1664525u + 1013904223u) >> 8) % n; }

void check(bool ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

typedef std::vector<int32_t> Tokens;

// What one part appends, and which tokens each of its tokens sees.
struct Wanted {
    Tokens tokens, parents;
    std::vector<Tokens> sees;
    Tokens after; // the sequence once the pass is over
};

Wanted make(const Tokens &before) {
    Wanted w;
    const int32_t n_chain = below(4), n_nodes = below(5);
    Tokens chain = before;
    for (int32_t i = 0; i < n_chain; i++) {
        w.tokens.push_back(below(1000));
        chain.push_back(w.tokens.back());
        w.sees.push_back(chain);
    }
    w.after = chain;
    std::vector<int32_t> path; // nodes of the current branch: depth-first order
    for (int32_t i = 0; i < n_nodes; i++) {
        path.resize((size_t)below((int32_t)path.size() + 1));
        w.parents.push_back(path.empty() ? -1 : path.back());
        Tokens sees = path.empty() ? chain : w.sees[(size_t)(n_chain + path.back())];
        w.tokens.push_back(below(1000));
        sees.push_back(w.tokens.back());
        w.sees.push_back(sees);
        if (sees.size() == chain.size() + (size_t)i + 1) {
            w.after = sees;
        }
        path.push_back(i);
    }
    return w;
}

void test_against_oracle() {
    Sequences sequences(SEQUENCES, CELLS, CONTEXT);
    std::vector<Tokens> oracle(SEQUENCES);
    Tokens held(CELLS); // the token in each cell
    int n_passes = 0, n_refused = 0;
    for (int round = 0; round < 200000; round++) {
        const int32_t i = below(SEQUENCES);
        if (const int32_t action = below(4); action == 0) {
            const int32_t n = below((int32_t)oracle[(size_t)i].size() + 2);
            const bool can = (size_t)n <= oracle[(size_t)i].size();
            check(sequences.rewind(i, n) == can, "rewind");
            oracle[(size_t)i].resize(can ? (size_t)n : oracle[(size_t)i].size());
        } else if (action == 1) {
            Tokens sources((size_t)below(SEQUENCES + 1));
            std::vector<Tokens> next(SEQUENCES);
            for (size_t s = 0; s < sources.size(); s++) {
                sources[s] = below(SEQUENCES);
                next[s] = oracle[(size_t)sources[s]];
            }
            check(sequences.reorder(sources.data(), sources.size()), "reorder");
            oracle = next;
        } else {
            std::vector<Wanted> wanted;
            std::vector<Part> parts;
            const int32_t n_parts = 1 + below(SEQUENCES);
            for (int32_t s = 0; s < n_parts; s++) {
                wanted.push_back(make(oracle[(size_t)s]));
            }
            bool fits = true;
            for (int32_t s = 0; s < n_parts; s++) {
                const Wanted &w = wanted[(size_t)s];
                parts.push_back({s, w.tokens.data(), w.tokens.size(), std::min<size_t>(1, w.tokens.size()), w.parents.data(),
                                 w.parents.size()});
                fits = fits && !w.tokens.empty();
                for (const Tokens &sees : w.sees) {
                    fits = fits && sees.size() <= CONTEXT;
                }
            }
            std::vector<Placed> placed;
            const char *const problem = sequences.append(parts, placed);
            check(fits || problem, "a part that does not fit was taken");
            n_refused += problem != nullptr;
            if (!problem) {
                size_t at = 0;
                for (const Wanted &w : wanted) {
                    for (size_t t = 0; t < w.tokens.size(); t++, at++) {
                        held[(size_t)placed[at].cell] = w.tokens[t];
                        Tokens seen;
                        for (const int32_t cell : placed[at].sees) {
                            seen.push_back(held[(size_t)cell]);
                        }
                        check(seen == w.sees[t], "what a token sees");
                        check(placed[at].position == (int32_t)w.sees[t].size() - 1, "its position");
                        check(placed[at].wants_logits == (t + 1 == w.tokens.size()), "whose logits are wanted");
                    }
                }
                if (below(8) == 0) {
                    sequences.undo(parts);
                } else {
                    sequences.keep_trunks(parts);
                    for (int32_t s = 0; s < n_parts; s++) {
                        oracle[(size_t)s] = wanted[(size_t)s].after;
                    }
                }
                n_passes++;
            }
        }
        check(sequences.is_consistent(), "each cell has its users");
        for (int32_t s = 0; s < SEQUENCES; s++) {
            check(sequences.n_past(s) == (int32_t)oracle[(size_t)s].size(), "length");
        }
    }
    printf("%d passes, %d refused\n", n_passes, n_refused);
    check(n_passes > 1000 && n_refused > 1000, "both have been met");
}

void test_impossible() {
    Sequences sequences(2, 8, 6);
    std::vector<Placed> placed;
    const int32_t tokens[9] = {}, bad[] = {0}, worse[] = {-2};
    const auto refuses = [&](const std::vector<Part> &parts) {
        return sequences.append(parts, placed) != nullptr && sequences.n_past(0) == 0 && sequences.is_consistent();
    };
    check(refuses({{2, tokens, 1, 1, nullptr, 0}}), "no such sequence");
    check(refuses({{-1, tokens, 1, 1, nullptr, 0}}), "a negative one");
    check(refuses({{0, tokens, 0, 0, nullptr, 0}}), "no tokens");
    check(refuses({{0, tokens, 1, 2, nullptr, 0}}), "too many logits");
    check(refuses({{0, tokens, 1, 1, bad, 1}}), "its own parent");
    check(refuses({{0, tokens, 1, 1, worse, 1}}), "no such parent");
    check(refuses({{0, tokens, 1, 1, bad, 2}}), "more nodes than tokens");
    check(refuses({{0, tokens, 7, 1, nullptr, 0}}), "longer than the context");
    check(refuses({{0, tokens, 5, 1, nullptr, 0}, {1, tokens, 5, 1, nullptr, 0}}), "more than there are cells");
    check(!sequences.rewind(0, 1) && !sequences.rewind(2, 0) && !sequences.rewind(0, -1), "rewind");
    const int32_t sources[] = {0, 2, 1};
    check(!sequences.reorder(sources, 2) && !sequences.reorder(sources, 3), "reorder");
    check(sequences.n_past(2) == -1 && sequences.n_past(-1) == -1, "no such sequence's length");
}

} // namespace

int main() {
    test_against_oracle();
    test_impossible();
    return 0;
}
