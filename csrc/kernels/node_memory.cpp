// The mappings behind a node's tensors.
#include "node_memory.h"
#include "packed.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <utility>

namespace edgespec {

using namespace ggml;

namespace {

// Pages that cost nothing until they are written; nullptr: there are none.
char *reserve(size_t size) {
    void *const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : (char *)memory;
}

size_t page_size() { return (size_t)sysconf(_SC_PAGESIZE); }

// Give the whole pages of [begin, end) back; they are zeros when they are read again. Returns their size.
size_t give_back(char *begin, char *end) {
    const uintptr_t page = page_size();
    char *const first = (char *)(((uintptr_t)begin + page - 1) / page * page);
    char *const last = (char *)((uintptr_t)end / page * page);
    return first < last && !madvise(first, (size_t)(last - first), MADV_DONTNEED) ? (size_t)(last - first) : 0;
}

// The same weights elsewhere.
Tensor at_place(const Tensor &weights, void *data) {
    Tensor t = weights;
    t.data = data;
    return t;
}

} // namespace

std::unique_ptr<NodeMemory> NodeMemory::make(size_t size) {
    std::unique_ptr<NodeMemory> memory(new (std::nothrow) NodeMemory);
    if (!memory || size > SIZE_MAX / 4) {
        return nullptr;
    }
    // Whole pages, and one more: kernels may load a whole vector at the end of a row.
    memory->size_ = (size / page_size() + 2) * page_size();
    memory->base_ = reserve(memory->size_);
    return memory->base_ ? std::move(memory) : nullptr;
}

NodeMemory::~NodeMemory() {
    if (aside_) {
        munmap(aside_, aside_size_);
    }
    if (base_) {
        munmap(base_, size_);
    }
}

template <class F> void NodeMemory::each_copy(const void *begin, size_t size, const F &f) {
    const char *const first = (const char *)begin, *const end = first + size;
    auto it = copies_.upper_bound(first);
    if (it != copies_.begin()) {
        --it; // it begins before, and may reach into the range
    }
    for (; it != copies_.end() && it->first < end; ++it) {
        if (it->first + it->second.plain_bytes > first) {
            f(it->second);
        }
    }
}

void NodeMemory::fill(const Isa &isa, Copy &copy) {
    if (copy.is_shown) {
        return;
    }
    const Tensor packed = at_place(copy.weights, copy.packed);
    unpack(isa, &packed, copy.weights.data);
    copy.is_shown = true;
    released_bytes_ -= (int64_t)copy.plain_bytes;
}

void NodeMemory::release(Copy &copy) {
    give_back((char *)copy.weights.data, (char *)copy.weights.data + copy.plain_bytes);
    copy.is_shown = false;
    released_bytes_ += (int64_t)copy.plain_bytes;
}

void NodeMemory::forget(Copy &copy) {
    if (copy.is_valid) {
        give_back(copy.packed, copy.packed + copy.packed_bytes);
        copy.is_valid = false;
        n_packed_--;
        packed_bytes_ -= (int64_t)copy.packed_bytes;
    }
}

const void *NodeMemory::pack(const Isa &isa, const Tensor *w) {
    const size_t plain = plain_size(w), packed = packed_size(isa, w);
    char *const place = (char *)w->data;
    if (place < base_ || plain > size_ || (size_t)(place - base_) > size_ - plain) {
        return nullptr;
    }
    auto found = copies_.find(place);
    const bool is_same = found != copies_.end() && found->second.weights.type == w->type &&
                         !memcmp(found->second.weights.ne, w->ne, sizeof w->ne);
    if (is_same && found->second.is_valid) {
        return found->second.packed;
    }
    if (!is_same) {
        change(isa, place, plain); // other weights were here
        for (auto it = copies_.begin(); it != copies_.end();) {
            const bool overlaps = it->first < place + plain && place < it->first + it->second.plain_bytes;
            it = overlaps ? copies_.erase(it) : std::next(it);
        }
        if (!aside_) {
            aside_size_ = 2 * size_ + (1 << 20);
            if (!(aside_ = reserve(aside_size_))) {
                return nullptr;
            }
            madvise(aside_, aside_size_, MADV_HUGEPAGE); // the stream of weights touches each page once a token
        }
        const size_t begin = (aside_used_ + WEIGHTS_ALIGNMENT - 1) / WEIGHTS_ALIGNMENT * WEIGHTS_ALIGNMENT;
        if (packed > aside_size_ || begin > aside_size_ - packed) {
            return nullptr;
        }
        found = copies_.emplace(place, Copy{*w, aside_ + begin, plain, packed, false, true}).first;
        aside_used_ = begin + packed;
    }
    Copy &copy = found->second;
    const Tensor there = at_place(*w, copy.packed);
    edgespec::pack(isa, &there, place);
    copy.is_valid = true;
    n_packed_++;
    packed_bytes_ += (int64_t)packed;
    release(copy);
    return copy.packed;
}

void NodeMemory::show(const Isa &isa, const void *begin, size_t size) {
    each_copy(begin, size, [&](Copy &copy) { fill(isa, copy); });
}

void NodeMemory::change(const Isa &isa, const void *begin, size_t size) {
    each_copy(begin, size, [&](Copy &copy) {
        fill(isa, copy);
        forget(copy);
    });
}

void NodeMemory::read(const Isa &isa, const void *begin, void *to, size_t size) {
    std::map<const char *, bool> were_shown;
    each_copy(begin, size, [&](Copy &copy) { were_shown[(const char *)copy.weights.data] = copy.is_shown; });
    show(isa, begin, size);
    memcpy(to, begin, size);
    each_copy(begin, size, [&](Copy &copy) {
        if (!were_shown[(const char *)copy.weights.data]) {
            release(copy);
        }
    });
}

void NodeMemory::clear(uint8_t value) {
    for (auto &entry : copies_) {
        forget(entry.second);
    }
    released_bytes_ = 0;
    copies_.clear();
    aside_used_ = 0;
    if (value || give_back(base_, base_ + size_) != size_) {
        memset(base_, value, size_);
    }
}

} // namespace edgespec
