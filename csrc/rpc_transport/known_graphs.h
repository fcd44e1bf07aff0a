// Graphs that went over a connection before, kept on both sides, so that a graph that is sent again is named instead.
//
// A pass over as many tokens as an earlier one has the same graph to the byte, until its cache has grown by 256 cells. And a
// graph is larger than all else of a pass: 16 KB a layer. ggml's protocol leaves it out where the last pass was alike; but
// when drafting, passes over few and over many tokens alternate.
//
//     sender:    at(p) equals the graph?  sends p                 receiver:  takes at(p)
//                none does?               sends NEW, the graph               takes the graph
//
// Then both put it first and drop what is too much at the end, so the lists are equal whenever a graph begins.
#ifndef EDGESPEC_KNOWN_GRAPHS_H
#define EDGESPEC_KNOWN_GRAPHS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

namespace edgespec {

class KnownGraphs {
  public:
    using Bytes = std::vector<uint8_t>;
    static constexpr uint8_t NEW = 255; // in place of a place
    static constexpr size_t MOST = 24, MOST_BYTES = 16 << 20;

    size_t size() const { return graphs_.size(); }
    const Bytes &at(size_t place) const { return graphs_[place]; }

    // The place of a graph; NEW: it is not known.
    uint8_t find(const void *graph, size_t size) const {
        for (size_t i = 0; i < graphs_.size(); i++) {
            if (graphs_[i].size() == size && memcmp(graphs_[i].data(), graph, size) == 0) {
                return (uint8_t)i;
            }
        }
        return NEW;
    }
    // Puts the graph at a place first.
    void use(size_t place) { std::rotate(graphs_.begin(), graphs_.begin() + place, graphs_.begin() + place + 1); }
    // Puts a new graph first. One that is larger than all may be is not kept.
    void add(const void *graph, size_t size) {
        if (size > MOST_BYTES) {
            return;
        }
        const uint8_t *const bytes = (const uint8_t *)graph;
        graphs_.insert(graphs_.begin(), Bytes(bytes, bytes + size));
        bytes_ += size;
        while (graphs_.size() > MOST || bytes_ > MOST_BYTES) {
            bytes_ -= graphs_.back().size();
            graphs_.pop_back();
        }
    }

  private:
    std::vector<Bytes> graphs_; // the one used last first
    size_t bytes_ = 0;
};

} // namespace edgespec

#endif
