#include "packed.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace edgespec {

using namespace ggml;

// The stream of weights touches each page once a token.
constexpr size_t HUGE_PAGE = 2 << 20;

void *alloc_weights(size_t size) {
    const size_t whole = (size + HUGE_PAGE) / HUGE_PAGE * HUGE_PAGE;
    void *memory = nullptr;
    if (size < HUGE_PAGE) {
        return posix_memalign(&memory, WEIGHTS_ALIGNMENT, size + WEIGHTS_ALIGNMENT) ? nullptr : memory;
    }
    if (posix_memalign(&memory, HUGE_PAGE, whole)) {
        return nullptr;
    }
    madvise(memory, whole, MADV_HUGEPAGE);
    return memory;
}

void *map_weights(const MappedFile &file, size_t size) {
    if (file.fd < 0 || (size_t)file.size != size) {
        return nullptr;
    }
    // At a multiple of a huge page: a file system that keeps files in huge pages maps them as such.
    const size_t reserved = size + HUGE_PAGE;
    char *const start = (char *)mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        return nullptr;
    }
    char *const begin = (char *)(((uintptr_t)start + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *const end = begin + (size + page - 1) / page * page;
    if (begin > start) {
        munmap(start, (size_t)(begin - start));
    }
    if (start + reserved > end) {
        munmap(end, (size_t)(start + reserved - end));
    }
    void *const map =
        mmap(begin, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file.fd, (off_t)file.offset);
    if (map == MAP_FAILED) {
        munmap(begin, size);
        return nullptr;
    }
    return map;
}

void unmap_weights(void *memory, size_t size) { munmap(memory, size); }

size_t plain_size(const Tensor *t) {
    return (size_t)(row_bytes(find_type(t->type), t->ne[0]) * t->ne[1] * t->ne[2]);
}

size_t packed_size(const Isa &isa, const Tensor *t) {
    return (size_t)(n_groups(t->ne[1], isa.layout.lanes) * t->ne[2] *
                    group_bytes(find_type(t->type), t->ne[0], isa.layout.lanes));
}

namespace {

// f(group, first row, rows) for all groups of all matrices, on all processors.
template <class F> void each_group(const Isa &isa, const Tensor *t, const F &f) {
    const int64_t of_matrix = n_groups(t->ne[1], isa.layout.lanes), groups = of_matrix * t->ne[2];
    const int n_threads = (int)std::min<int64_t>(groups, omp_get_num_procs());
    run_team(n_threads, [&](Team &team, int thread) {
        for (int64_t g = groups * thread / team.size(); g < groups * (thread + 1) / team.size(); g++) {
            const int64_t first = g % of_matrix * isa.layout.lanes;
            f(g, g / of_matrix * t->ne[1] + first, (int)std::min<int64_t>(isa.layout.lanes, t->ne[1] - first));
        }
    });
}

} // namespace

void pack(const Isa &isa, const Tensor *t, const void *blocks) {
    const Type type = find_type(t->type);
    each_group(isa, t, [&](int64_t g, int64_t first, int rows) {
        pack_group(type, t->ne[0], isa.layout, rows, (const uint8_t *)blocks + first * row_bytes(type, t->ne[0]),
                   (uint8_t *)t->data + g * group_bytes(type, t->ne[0], isa.layout.lanes));
    });
}

void unpack(const Isa &isa, const Tensor *t, void *blocks) {
    const Type type = find_type(t->type);
    each_group(isa, t, [&](int64_t g, int64_t first, int rows) {
        unpack_group(type, t->ne[0], isa.layout, rows,
                     (const uint8_t *)t->data + g * group_bytes(type, t->ne[0], isa.layout.lanes),
                     (uint8_t *)blocks + first * row_bytes(type, t->ne[0]));
    });
}

} // namespace edgespec
