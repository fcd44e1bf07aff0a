// How fast the kernels are, without ggml: products over weights that come from memory, and what limits them.
#include "edgespec_kernels.h"
#include "packed.h"
#include "product.h"

#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <new>

using namespace edgespec;

struct es_stream {
    uint8_t *weights;
    size_t size, next; // where the next pass begins

    // The next `bytes` of it; nullptr if it has fewer.
    const uint8_t *take(size_t bytes) {
        if (bytes > size) {
            return nullptr;
        }
        const size_t begin = bytes > size - next ? 0 : next;
        next = begin + (bytes + WEIGHTS_ALIGNMENT - 1) / WEIGHTS_ALIGNMENT * WEIGHTS_ALIGNMENT;
        next = std::min(next, size);
        return weights + begin;
    }
};

namespace {

// As weights, activations and scales such bytes are small positive numbers: neither they nor their products are slow to
// compute with.
constexpr int FILLING = 0x11, ACTS_FILLING = 0x3C;
constexpr int64_t LARGEST = 1 << 20, MOST_TOKENS = 4096, CHUNK = 1 << 17;

const Isa *isa() { return find_isa(es_kernels_isa()); }

// Seconds that `body` takes on a team.
template <class Body> double time_team(int n_threads, const Body &body) {
    const auto began = std::chrono::steady_clock::now();
    run_team(n_threads, body);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

int64_t packed_bytes(const Isa &isa, const es_shape &shape) {
    const Type type = find_type(shape.type);
    if (type == N_TYPES || shape.rows < 1 || shape.columns < 1 || shape.rows > LARGEST || shape.columns > LARGEST ||
        shape.columns % FORMATS[type].block) {
        return -1;
    }
    return n_groups(shape.rows, isa.layout.lanes) * group_bytes(type, shape.columns, isa.layout.lanes);
}

// Products one after another, with memory for what goes in and comes out.
struct Products {
    std::vector<Product> products;
    std::unique_ptr<std::atomic<int64_t>[]> counters; // chunks taken
    std::unique_ptr<uint8_t[]> acts;
    std::unique_ptr<float[]> y;

    // Whether all could be packed and fit into the stream.
    bool plan(es_stream &stream, const es_shape *shapes, int64_t n_shapes, int64_t n, const Prefetch &prefetch,
              int n_threads) {
        int64_t act_bytes = 0, rows = 0;
        for (int64_t i = 0; i < n_shapes; i++) {
            const es_shape &shape = shapes[i];
            const int64_t bytes = packed_bytes(*isa(), shape);
            const uint8_t *weights = bytes < 0 ? nullptr : stream.take((size_t)bytes);
            if (!weights) {
                return false;
            }
            const Acts acts = FORMATS[find_type(shape.type)].acts;
            products.push_back({*isa(), prefetch, find_type(shape.type), shape.rows, shape.columns, n, weights, nullptr, nullptr,
                                tile_size(wide_from(*isa()), acts, n)});
            act_bytes = std::max(act_bytes, n_steps(shape.columns) * record_bytes(acts, n));
            rows = std::max(rows, shape.rows);
        }
        counters.reset(new std::atomic<int64_t>[products.size() * (size_t)n_threads]());
        const size_t acts_size = (size_t)act_bytes + WEIGHTS_ALIGNMENT;
        acts.reset(new uint8_t[acts_size]);
        memset(acts.get(), ACTS_FILLING, acts_size);
        y.reset(new float[(size_t)(rows * n)]());
        for (Product &product : products) {
            product.acts = (const int8_t *)(((uintptr_t)acts.get() + 63) & ~(uintptr_t)63);
            product.y = y.get();
        }
        return true;
    }

    void run(Team &team, int thread) {
        const int n = team.size();
        for (size_t i = 0; i < products.size(); i++) {
            const int64_t chunks = products[i].n_chunks(n);
            each_chunk(&counters[i * (size_t)n], chunks, thread, n, [&](int64_t c) { products[i].run(c, chunks); });
            team.barrier();
        }
    }
};

} // namespace

extern "C" {

es_stream *es_kernels_stream_new(size_t bytes) {
    es_stream *const stream = new (std::nothrow) es_stream{};
    uint8_t *const weights = (uint8_t *)alloc_weights(bytes);
    if (!stream || !weights) {
        delete stream;
        free(weights);
        return nullptr;
    }
    run_team(std::max(1, omp_get_num_procs()), [&](Team &team, int thread) {
        const size_t n = (size_t)team.size(), begin = bytes / n * (size_t)thread;
        memset(weights + begin, FILLING, (size_t)thread + 1 < n ? bytes / n : bytes - begin);
    });
    *stream = {weights, bytes, 0};
    return stream;
}

void es_kernels_stream_free(es_stream *stream) {
    if (stream) {
        free(stream->weights);
        delete stream;
    }
}

int64_t es_kernels_packed_bytes(const es_shape *shape) { return isa() ? packed_bytes(*isa(), *shape) : -1; }

double es_kernels_time_products(es_stream *stream, const es_shape *shapes, int64_t n_shapes, int64_t n,
                                es_prefetch chosen, int n_threads) {
    const Prefetch prefetch = {chosen.level, chosen.bytes};
    if (!isa() || n_shapes < 1 || n < 1 || n > MOST_TOKENS || n_threads < 1 || !prefetch.is_possible()) {
        return -1;
    }
    try {
        Products products;
        if (!products.plan(*stream, shapes, n_shapes, n, prefetch, n_threads)) {
            return -1;
        }
        return time_team(n_threads, [&](Team &team, int thread) { products.run(team, thread); });
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

double es_kernels_time_read(es_stream *stream, size_t bytes, es_prefetch chosen, int n_threads) {
    const Prefetch prefetch = {chosen.level, chosen.bytes};
    const uint8_t *const weights = stream->take(bytes / CHUNK * CHUNK);
    if (!isa() || !weights || bytes < CHUNK || n_threads < 1 || !prefetch.is_possible()) {
        return -1;
    }
    std::unique_ptr<std::atomic<int64_t>[]> taken(new (std::nothrow) std::atomic<int64_t>[(size_t)n_threads]());
    if (!taken) {
        return -1;
    }
    std::atomic<int32_t> sum{0};
    return time_team(n_threads, [&](Team &team, int thread) {
        each_chunk(taken.get(), (int64_t)(bytes / CHUNK), thread, team.size(), [&](int64_t chunk) {
            sum.fetch_xor(isa()->read(weights + chunk * CHUNK, CHUNK, prefetch), std::memory_order_relaxed);
        });
    });
}

double es_kernels_peak(int64_t rounds, int n_threads) {
    if (!isa() || rounds < 1 || n_threads < 1) {
        return -1;
    }
    std::atomic<int64_t> products{0};
    const double seconds = time_team(n_threads, [&](Team &, int) {
        products.fetch_add(isa()->peak(rounds), std::memory_order_relaxed);
    });
    return (double)products / seconds;
}
}
