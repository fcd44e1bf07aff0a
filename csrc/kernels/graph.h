// Runs a ggml graph, or a part of one, on a team of threads.
#pragma once

#include "experts.h"
#include "ggml_abi.h"
#include "hidden.h"
#include "isa.h"
#include "team.h"
#include "views.h"

#include <deque>
#include <list>
#include <math.h>
#include <memory>
#include <vector>

namespace edgespec {

// ggml's functions that the plugin calls, looked up in the loaded libraries.
struct Ggml {
    int (*graph_n_nodes)(ggml::Graph *);
    ggml::Tensor *(*graph_node)(ggml::Graph *, int);
    ggml::Buffer *(*backend_buffer_init)(ggml::BufferType *, ggml::BufferInterface, void *context, size_t size);
    bool (*backend_buft_is_host)(ggml::BufferType *);
    size_t (*nbytes)(const ggml::Tensor *);
    ggml::BufferType *(*backend_cpu_buffer_type)();
    const ggml::BufferType *packed; // of weights that are packed
};

// Whether weights of this type and shape can be packed.
bool can_pack(const ggml::Tensor *weights);

// Whether `op` is a product with packed weights that can be run.
bool is_packed_matmul(const ggml::Tensor *op, const Ggml &ggml);

// Whether `op` multiplies each row with a Hadamard matrix, as llama.cpp does with what a quantized cache holds.
bool is_hadamard(const ggml::Tensor *op);

// Whether `op` is one of the others that can be run.
bool can_run(const ggml::Tensor *op, const Ggml &ggml);

// ln(1 + e^x)
inline float softplus(float x) { return x > 20 ? x : logf(1 + expf(x)); }

// Rows (token, head) of queries that share a head of the cache, [first, last) of all of them; they see places in
// segments [first_segment, last_segment) of ATTN_SEGMENT.
struct Tile {
    int64_t first, last;
    int64_t first_segment, last_segment;
    int64_t piece; // how many segments the tiles before have
};

// How an attention is cut into units of work: heads of the cache x tiles of rows, and perhaps x their segments.
struct Attention {
    const Views *views;
    int64_t head_dim, value_dim, n_heads, gqa, n_rows; // n_rows for each head of the cache
    int64_t n_tiles, n_pieces;              // of each head
    size_t first_tile;                      // of the executor's
    bool by_segment; // too few tiles for the threads: segments are units too, merged in a second step

    Attention(const ggml::Tensor *op, const Views *views);
    int64_t n_units() const { return n_heads * (by_segment ? n_pieces : n_tiles); }
    size_t state_floats() const { return AttentionState::n_floats(value_dim, n_rows < ATTN_ROWS ? (int)n_rows : ATTN_ROWS); }
};

// One context's executor; it keeps its work memory from graph to graph.
class Executor {
  public:
    Executor(const Isa &isa, const Prefetch &prefetch, const Ggml &ggml) : isa_(isa), prefetch_(prefetch), ggml_(ggml) {}

    int n_threads = 1;
    bool (*abort)(void *) = nullptr; // asked by thread 0 between operations
    void *abort_data = nullptr;
    int64_t wanted_logits = -1; // of the last tokens of a graph; -1: of all
    HiddenStates *hidden = nullptr; // asked of the graphs

    // Caches have been freed: others may lie there now.
    void forget_caches() { cells_.clear(); }

    int compute(ggml::Graph *graph); // a ggml status

    // Nodes outside of a graph, for tests. Both may throw std::bad_alloc.
    int compute(const std::vector<ggml::Tensor *> &nodes);

    // What threads do between two barriers.
    struct Step {
        void (Executor::*run)(const Step &, int thread, int n);
        const ggml::Tensor *op;
        const ggml::Tensor *fused = nullptr; // the ADD after a product, the MUL after a norm: written as well
        const ggml::Tensor *other = nullptr; // its other operand
        const ggml::Tensor *biased = nullptr; // the ADD after that MUL
        size_t index = 0;                    // of the counters
        size_t angles = 0, attention = 0, routing = 0, kept = 0; // which of angles_, attentions_, routings_, kept_
        bool joined = false;                 // no barrier comes before it
        Step(void (Executor::*f)(const Step &, int, int), const ggml::Tensor *t) : run(f), op(t) {}
    };
    // ---- steps ----
    void quantize(const Step &step, int thread, int n);
    void matmul(const Step &step, int thread, int n);
    void float_matmul(const Step &step, int thread, int n);
    void route(const Step &step, int thread, int n);
    void quantize_routed(const Step &step, int thread, int n);
    void matmul_routed(const Step &step, int thread, int n);
    void norm(const Step &step, int thread, int n);
    void binary(const Step &step, int thread, int n);
    void unary(const Step &step, int thread, int n);
    void glu(const Step &step, int thread, int n);
    void add_id(const Step &step, int thread, int n);
    void sum_rows(const Step &step, int thread, int n);
    void soft_max(const Step &step, int thread, int n);
    void hadamard(const Step &step, int thread, int n);
    void argsort(const Step &step, int thread, int n);
    void rope(const Step &step, int thread, int n);
    void set_rows(const Step &step, int thread, int n);
    void get_rows(const Step &step, int thread, int n);
    void copy(const Step &step, int thread, int n);
    void repeat(const Step &step, int thread, int n);
    void concat(const Step &step, int thread, int n);
    void ssm_conv(const Step &step, int thread, int n);
    void delta_net(const Step &step, int thread, int n);
    void state_scan(const Step &step, int thread, int n);
    void attend(const Step &step, int thread, int n);
    void merge(const Step &step, int thread, int n);
    void pack_seen(const Step &step, int thread, int n);
    void pack_rows(const Step &step, int thread, int n);
    void attend_all(const Step &step, int thread, int n);
    void keep(const Step &step, int thread, int n);

  private:
    // Cosines and sines of a rotation, n_tokens x n_dims / 2: the same for all layers, computed once a graph.
    struct Angles {
        const ggml::Tensor *op; // the first rotation with these parameters
        float *cosines, *sines;
    };
    static constexpr size_t NONE = (size_t)-1;
    // What a plan has to know while it is made.
    struct Planning {
        const std::vector<const ggml::Tensor *> &ops;
        size_t i = 0; // the operation whose turn it is
        size_t acts = 0, states = 0, angles = 0, keys = 0, full = 0; // memory
        // What acts_ holds, sorted how, and as what.
        const ggml::Tensor *quantized = nullptr;
        size_t routing = NONE;
        Acts act_kind = BYTES_32;

        explicit Planning(const std::vector<const ggml::Tensor *> &o) : ops(o) {}
        const ggml::Tensor *next() const { return i + 1 < ops.size() ? ops[i + 1] : nullptr; }
    };

    bool plan(const std::vector<ggml::Tensor *> &nodes);
    void plan_product(Planning &planning, const ggml::Tensor *op);
    size_t plan_routing(const ggml::Tensor *op);
    void plan_norm(Planning &planning, const ggml::Tensor *op);
    const ggml::Tensor *last_logits(const ggml::Tensor *op);
    void plan_rope(Planning &planning, const ggml::Tensor *op);
    void plan_attention(Planning &planning, const ggml::Tensor *op);
    void plan_full_attention(Planning &planning, const ggml::Tensor *op);
    void plan_copy(Planning &planning, const ggml::Tensor *op);
    void plan_recurrence(Planning &planning, const ggml::Tensor *op);
    void plan_kept(const ggml::Tensor *op);
    void join_steps();
    void set_up_memory(const Planning &planning);
    Cells *cells_of(const ggml::Tensor *keys);
    void learn_cells(const std::vector<const ggml::Tensor *> &ops);
    bool knows_positions(int64_t n) const;
    const Views *find_views(const ggml::Tensor *attention);
    void cut(Attention &attention);
    void run(Team &team, int thread);

    void compute_angles(int thread, int n);
    const Isa &isa_;
    const Prefetch prefetch_;
    const Ggml &ggml_;
    std::vector<Step> steps_;
    std::vector<Angles> angles_;
    std::list<Cells> cells_;  // one for each cache, from graph to graph
    const ggml::Tensor *positions_ = nullptr; // of the graph's tokens, if known
    std::deque<Views> views_; // one for each mask and cache: all layers have the same few
    size_t n_views_ = 0;      // of this graph; the others are kept for their memory
    std::vector<Routing> routings_;
    std::vector<std::vector<float *>> kept_; // where rows of a hidden state go
    std::deque<ggml::Tensor> parts_; // of tensors that are not wanted whole
    std::vector<Attention> attentions_;
    std::vector<Tile> tiles_;
    std::unique_ptr<std::atomic<int64_t>[]> counters_; // work units taken, n_threads for each step
    size_t n_counters_ = 0;
    std::unique_ptr<char[]> memory_;
    size_t memory_size_ = 0;
    int8_t *acts_ = nullptr;
    int64_t wide_from_ = INT64_MAX; // tokens of the products of this graph
    float *states_ = nullptr;
    size_t recurrence_floats_ = 0; // of states_, for each thread
    uint64_t *keys_ = nullptr; // n_keys_ for each thread, to sort
    size_t n_keys_ = 0;
    char *full_ = nullptr; // of attention without a mask, see full_attention.h
    std::atomic<size_t> n_wanted_{0}; // steps to run: fewer after an abort
};

} // namespace edgespec
