// Memory of a node: tensors as ggml lays them out, and the weights among them packed aside.
//
// Clients place tensors by ggml's rules, so a packed copy, which is larger, cannot lie in the place of its weights. It
// lies in a second mapping, and the pages of the place go back to the system: weights are held once.
//
//     place    | norm | ////// given back ////// | norm | ////// given back ////// |    plain_size of each
//     aside    | packed weights | packed weights |                                      made at their first product
//
// Whoever reads or writes the place by other ways than a product calls `show` or `change` before.
#pragma once

#include "graph.h"

#include <map>
#include <memory>

namespace edgespec {

class NodeMemory {
  public:
    // nullptr: there is no memory.
    static std::unique_ptr<NodeMemory> make(size_t size);
    ~NodeMemory();
    NodeMemory(const NodeMemory &) = delete;
    NodeMemory &operator=(const NodeMemory &) = delete;

    char *base() const { return base_; }
    bool has_packed() const { return n_packed_ > 0; }
    int64_t n_packed() const { return n_packed_; }
    // What packed copies take, and what places have given back for them.
    int64_t packed_bytes() const { return packed_bytes_; }
    int64_t released_bytes() const { return released_bytes_; }

    // The packed copy of weights that lie here, made if there is none; nullptr: it cannot be made.
    const void *pack(const Isa &isa, const ggml::Tensor *weights);

    // Fill the place of what is packed in [begin, begin + size), which somebody will read; products go on with the
    // packed copy.
    void show(const Isa &isa, const void *begin, size_t size);
    // The same for somebody who will write there: the packed copies are of no use any more.
    void change(const Isa &isa, const void *begin, size_t size);
    // Copy from there, without keeping both.
    void read(const Isa &isa, const void *begin, void *to, size_t size);
    // All bytes become `value`.
    void clear(uint8_t value);

  private:
    // Weights that have been packed.
    struct Copy {
        ggml::Tensor weights; // their type and shape, and where they lie
        char *packed;
        size_t plain_bytes, packed_bytes;
        bool is_valid;        // the packed copy is
        bool is_shown;        // the place is
    };
    NodeMemory() = default;
    template <class F> void each_copy(const void *begin, size_t size, const F &f);
    void fill(const Isa &isa, Copy &copy);
    void release(Copy &copy);
    void forget(Copy &copy);

    char *base_ = nullptr, *aside_ = nullptr;
    size_t size_ = 0, aside_size_ = 0, aside_used_ = 0;
    std::map<const char *, Copy> copies_; // by the beginning of their place; places do not overlap
    int64_t n_packed_ = 0, packed_bytes_ = 0, released_bytes_ = 0;
};

} // namespace edgespec
