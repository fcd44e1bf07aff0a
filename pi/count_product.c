/* One product of weights and n tokens on one thread, by ggml, twice, with a line after each:
 *
 *     count_product TYPE ROWS COLUMNS N [PLUGIN|plain]
 *
 * The weights lie where llama.cpp would put them: with PLUGIN packed for edgespec's kernels, else in the
 * first of the CPU's buffer types that takes them (its own repacking), else plain, as "plain" has them always. */
#include <ggml-backend.h>
#include <ggml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void need(int ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

int main(int argc, char **argv) {
    need(argc == 5 || argc == 6, "arguments: TYPE ROWS COLUMNS N [PLUGIN|plain]");
    const int is_plain = argc == 6 && !strcmp(argv[5], "plain");
    const enum ggml_type type = atoi(argv[1]);
    const int64_t rows = atoll(argv[2]), columns = atoll(argv[3]), n = atoll(argv[4]);
    ggml_backend_load_all(); /* of a library with variants, the one that GGML_BACKEND_PATH names */
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), device = cpu;
    need(cpu != NULL, "a CPU backend");
    if (argc == 6 && !is_plain) {
        ggml_backend_reg_t plugin = ggml_backend_load(argv[5]);
        need(plugin != NULL, "the plugin");
        device = ggml_backend_reg_dev_get(plugin, 0);
    }
    struct ggml_init_params parameters = {ggml_tensor_overhead() * 8, NULL, true};
    struct ggml_context *weights_of = ggml_init(parameters), *others_of = ggml_init(parameters);
    parameters.mem_size = ggml_graph_overhead() + ggml_tensor_overhead() * 8;
    struct ggml_tensor *w = ggml_new_tensor_2d(weights_of, type, columns, rows);
    struct ggml_tensor *x = ggml_new_tensor_2d(others_of, GGML_TYPE_F32, columns, n);
    struct ggml_tensor *y = ggml_mul_mat(others_of, w, x);

    ggml_backend_buffer_type_t choices[8] = {0};
    int n_choices = 0;
    if (device != cpu) {
        choices[n_choices++] = ggml_backend_dev_buffer_type(device);
    } else {
        ggml_backend_dev_get_extra_bufts_t extra =
            (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu),
                                                                                 "ggml_backend_dev_get_extra_bufts");
        for (ggml_backend_buffer_type_t *b = extra && !is_plain ? extra(cpu) : NULL; b && *b && n_choices < 7; b++) {
            choices[n_choices++] = *b;
        }
        choices[n_choices++] = ggml_backend_dev_buffer_type(cpu);
    }
    int chosen = -1;
    for (int i = 0; i < n_choices && chosen < 0; i++) { /* as llama.cpp asks: with an empty buffer of that type */
        w->buffer = ggml_backend_buft_alloc_buffer(choices[i], 0);
        chosen = device != cpu || ggml_backend_dev_supports_op(cpu, y) ? i : -1;
        ggml_backend_buffer_free(w->buffer);
        w->buffer = NULL;
    }
    need(chosen >= 0, "a buffer type");
    need(ggml_backend_alloc_ctx_tensors_from_buft(weights_of, choices[chosen]) != NULL, "memory");
    need(ggml_backend_alloc_ctx_tensors_from_buft(others_of, ggml_backend_dev_buffer_type(cpu)) != NULL, "memory");
    const size_t size = ggml_row_size(type, columns) * (size_t)rows;
    char *blocks = malloc(size);
    need(blocks != NULL, "memory");
    for (size_t i = 0; i < size; i++) {
        blocks[i] = (char)(i * 37 % 61); /* no scale is infinite */
    }
    ggml_backend_tensor_set(w, blocks, 0, size);
    for (int64_t i = 0; i < columns * n; i++) {
        const float value = (float)(i % 17) - 8;
        ggml_backend_tensor_set(x, &value, (size_t)i * sizeof value, sizeof value);
    }

    ggml_backend_t backend = ggml_backend_dev_init(device, NULL);
    need(backend != NULL, "the backend");
    ggml_backend_set_n_threads_t set_threads = (ggml_backend_set_n_threads_t)ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads");
    need(set_threads != NULL, "the number of threads");
    set_threads(backend, 1);
    parameters.mem_size = ggml_graph_overhead() + 64;
    struct ggml_context *graph_of = ggml_init(parameters);
    struct ggml_cgraph *graph = ggml_new_graph(graph_of);
    ggml_build_forward_expand(graph, y);
    for (int i = 0; i < 2; i++) {
        need(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "the product");
        printf("%s\n", ggml_backend_buft_name(choices[chosen]));
        fflush(stdout);
    }
    return 0;
}
