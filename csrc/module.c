/* Python bindings of the C core, and nothing else.  Limited API: one wheel for Python >= 3.11.
 *
 * Arrays come in through the buffer protocol, are used in place and have their type and length
 * checked here; the core runs without the GIL. */
#include "module.h"

#include "interrupt.h"
#include "philox.h"
#include "verify.h"

#include <string.h>

/* ---- Sampler ---- */

static PyObject *raise_status(es_status status) {
    switch (status) {
    case ES_NOT_FINITE:
        PyErr_SetString(PyExc_ArithmeticError, "a logit or probability is not a finite number");
        break;
    case ES_NO_TOKEN:
        PyErr_SetString(PyExc_ArithmeticError, "no token has a probability above 0");
        break;
    default:
        PyErr_SetString(PyExc_ValueError, "a length or index is outside what this Sampler was made for");
    }
    return NULL;
}

typedef struct sampler_object {
    PyObject_HEAD
    es_sampler *sampler;
    bool busy; /* read and written under the GIL; the core runs without it and is not re-entrant */
} sampler_object;

static int enter(sampler_object *self) { return take_turn(&self->busy, "Sampler"); }

static PyObject *sampler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"n_vocab",        "n_slots",           "temperature",      "top_k",
                               "top_p",          "min_p",             "typical_p",        "penalty_last_n",
                               "repeat_penalty", "frequency_penalty", "presence_penalty", "logit_bias", NULL};
    Py_ssize_t n_vocab, n_slots;
    es_params params;
    PyObject *bias = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nn$fifffifffO!:Sampler", keywords, &n_vocab, &n_slots,
                                     &params.temperature, &params.top_k, &params.top_p, &params.min_p,
                                     &params.typical_p, &params.penalty_last_n, &params.repeat_penalty,
                                     &params.frequency_penalty, &params.presence_penalty, &PyDict_Type, &bias))
        return NULL;
    if (!bias) {
        PyErr_SetString(PyExc_TypeError, "Sampler() takes every sampling parameter");
        return NULL;
    }
    if (n_vocab < 1 || n_vocab > INT32_MAX || n_slots < 0 || n_slots > 4096) {
        PyErr_SetString(PyExc_ValueError, "n_vocab must be 1..2^31-1 and n_slots 0..4096");
        return NULL;
    }

    /* A list of our own: converting an entry can run Python code, which could change the dict. */
    PyObject *entries = PyDict_Items(bias);
    if (!entries) return NULL;
    const Py_ssize_t n_bias = PyList_Size(entries);
    int32_t *ids = PyMem_Malloc((size_t)(n_bias + 1) * sizeof *ids);
    float *values = PyMem_Malloc((size_t)(n_bias + 1) * sizeof *values);
    sampler_object *self = NULL;
    if (!ids || !values) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < n_bias; i++) {
        PyObject *entry = PyList_GetItem(entries, i);
        const long id = PyLong_AsLong(PyTuple_GetItem(entry, 0));
        if (PyErr_Occurred()) goto done;
        values[i] = (float)PyFloat_AsDouble(PyTuple_GetItem(entry, 1));
        if (PyErr_Occurred()) goto done;
        if (id < 0 || id >= n_vocab) {
            PyErr_Format(PyExc_ValueError, "logit bias: token %ld is outside the vocabulary of %zd", id, n_vocab);
            goto done;
        }
        ids[i] = (int32_t)id;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    self = (sampler_object *)allocate(type, 0);
    if (!self) goto done;
    self->busy = false;
    self->sampler = es_sampler_new((size_t)n_vocab, (size_t)n_slots, &params, ids, values, (size_t)n_bias);
    if (!self->sampler) {
        Py_CLEAR(self);
        PyErr_NoMemory();
    }
done:
    PyMem_Free(ids);
    PyMem_Free(values);
    Py_DECREF(entries);
    return (PyObject *)self;
}

static void sampler_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    es_sampler_free(((sampler_object *)object)->sampler);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* The distribution a Python caller names: a slot index, or -1 for the target's. */
static es_dist *dist_at(es_sampler *s, Py_ssize_t slot) {
    if (slot == -1) return &s->target;
    if (slot >= 0 && (size_t)slot < s->n_slots) return &s->slots[slot];
    PyErr_Format(PyExc_ValueError, "slot %zd: this Sampler has %zu", slot, s->n_slots);
    return NULL;
}

static PyObject *sampler_sample(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    PyObject *row_object, *prefix_object;
    double coin;
    Py_ssize_t slot;
    if (!PyArg_ParseTuple(args, "OOdn:sample", &row_object, &prefix_object, &coin, &slot)) return NULL;
    es_dist *dist = dist_at(self->sampler, slot);
    if (!dist) return NULL;
    Py_buffer row, prefix;
    if (get_buffer(row_object, &row, 'f', "row", 0) < 0) return NULL;
    if (get_buffer(prefix_object, &prefix, 'i', "prefix", 0) < 0) goto release_row;
    if (enter(self) < 0) goto release_both;
    es_status status;
    int32_t token = -1;
    Py_BEGIN_ALLOW_THREADS
    status = es_filter(self->sampler, row.buf, n_elements(&row), prefix.buf, n_elements(&prefix), dist);
    if (status == ES_OK) token = es_dist_sample(dist, coin);
    Py_END_ALLOW_THREADS
    self->busy = false;
    PyBuffer_Release(&prefix);
    PyBuffer_Release(&row);
    return status == ES_OK ? PyLong_FromLong(token) : raise_status(status);
release_both:
    PyBuffer_Release(&prefix);
release_row:
    PyBuffer_Release(&row);
    return NULL;
}

static PyObject *sampler_set_probs(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot;
    PyObject *probs_object;
    if (!PyArg_ParseTuple(args, "nO:set_probs", &slot, &probs_object)) return NULL;
    es_dist *dist = dist_at(self->sampler, slot);
    Py_buffer probs;
    if (!dist || get_buffer(probs_object, &probs, 'f', "probs", 0) < 0) return NULL;
    const bool entered = enter(self) == 0;
    es_status status = ES_OK;
    if (entered) {
        status = es_dist_set(self->sampler, probs.buf, n_elements(&probs), dist);
        self->busy = false;
    }
    PyBuffer_Release(&probs);
    if (!entered) return NULL;
    if (status != ES_OK) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *sampler_set_point(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot;
    int token;
    if (!PyArg_ParseTuple(args, "ni:set_point", &slot, &token)) return NULL;
    es_dist *dist = dist_at(self->sampler, slot);
    if (!dist || enter(self) < 0) return NULL;
    const es_status status = es_dist_set_point(self->sampler, token, dist);
    self->busy = false;
    if (status != ES_OK) return raise_status(status);
    Py_RETURN_NONE;
}

/* Writes a normalised distribution by token id into out[n_vocab] and returns None. */
static PyObject *write_probs(const es_sampler *s, const es_dist *dist, PyObject *out_object) {
    Py_buffer out;
    if (get_buffer(out_object, &out, 'f', "out", PyBUF_WRITABLE) < 0) return NULL;
    if (n_elements(&out) != s->n_vocab) {
        PyBuffer_Release(&out);
        return raise_status(ES_BAD_LENGTH);
    }
    float *values = out.buf;
    memset(values, 0, s->n_vocab * sizeof *values);
    for (size_t i = 0; i < dist->n; i++)
        values[dist->dense ? (int32_t)i : dist->ids[i]] = (float)((double)dist->probs[i] / dist->total);
    PyBuffer_Release(&out);
    Py_RETURN_NONE;
}

static PyObject *sampler_top(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot;
    if (!PyArg_ParseTuple(args, "n:top", &slot)) return NULL;
    const es_dist *dist = dist_at(self->sampler, slot);
    if (!dist || enter(self) < 0) return NULL;
    PyObject *result = dist->total > 0 ? PyLong_FromLong(es_dist_top(dist)) : raise_status(ES_NO_TOKEN);
    self->busy = false;
    return result;
}

static PyObject *sampler_confidence(PyObject *object, PyObject *row_object) {
    sampler_object *self = (sampler_object *)object;
    Py_buffer row;
    if (get_buffer(row_object, &row, 'f', "row", 0) < 0) return NULL;
    PyObject *result = NULL;
    if (enter(self) == 0) {
        double confidence;
        const es_status status = es_confidence(self->sampler, row.buf, n_elements(&row), &confidence);
        result = status == ES_OK ? PyFloat_FromDouble(confidence) : raise_status(status);
        self->busy = false;
    }
    PyBuffer_Release(&row);
    return result;
}

static PyObject *sampler_probs(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot;
    PyObject *out;
    if (!PyArg_ParseTuple(args, "nO:probs", &slot, &out)) return NULL;
    const es_dist *dist = dist_at(self->sampler, slot);
    if (!dist || enter(self) < 0) return NULL;
    PyObject *result = dist->total > 0 ? write_probs(self->sampler, dist, out) : raise_status(ES_NO_TOKEN);
    self->busy = false;
    return result;
}

/* The views behind an es_draft. */
typedef struct draft_views {
    Py_buffer rows, tokens, prefix;
    es_draft draft;
} draft_views;

static int get_draft(const es_sampler *s, PyObject *rows, PyObject *tokens, PyObject *prefix, draft_views *v) {
    if (get_buffer(rows, &v->rows, 'f', "rows", 0) < 0) return -1;
    if (get_buffer(tokens, &v->tokens, 'i', "draft", 0) < 0) goto release_rows;
    if (get_buffer(prefix, &v->prefix, 'i', "prefix", 0) < 0) goto release_tokens;
    v->draft = (es_draft){
        .tokens = v->tokens.buf,
        .n = n_elements(&v->tokens),
        .rows = v->rows.buf,
        .n_rows = n_elements(&v->rows) / s->n_vocab,
        .prefix = v->prefix.buf,
        .n_prefix = n_elements(&v->prefix),
    };
    if (n_elements(&v->rows) % s->n_vocab == 0) return 0;
    PyErr_SetString(PyExc_ValueError, "rows: the length is not a multiple of n_vocab");
    PyBuffer_Release(&v->prefix);
release_tokens:
    PyBuffer_Release(&v->tokens);
release_rows:
    PyBuffer_Release(&v->rows);
    return -1;
}

static void release_draft(draft_views *v) {
    PyBuffer_Release(&v->prefix);
    PyBuffer_Release(&v->tokens);
    PyBuffer_Release(&v->rows);
}

/* (p, q) of the accepted tokens and of the first rejected one. */
static PyObject *list_of_judged(const es_judged *judged, size_t n_accepted, size_t n) {
    const size_t n_judged = n_accepted < n ? n_accepted + 1 : n;
    PyObject *list = PyList_New((Py_ssize_t)n_judged);
    for (size_t i = 0; list && i < n_judged; i++) {
        PyObject *pair = Py_BuildValue("dd", judged[i].p, judged[i].q);
        if (!pair || PyList_SetItem(list, (Py_ssize_t)i, pair) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *sampler_verify(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    PyObject *rows, *tokens, *prefix, *coin_list;
    int block;
    if (!PyArg_ParseTuple(args, "OOOO!p:verify", &rows, &tokens, &prefix, &PyList_Type, &coin_list, &block))
        return NULL;
    draft_views views;
    if (get_draft(self->sampler, rows, tokens, prefix, &views) < 0) return NULL;
    PyObject *result = NULL;
    const size_t n_coins = views.draft.n + 1;
    double *coins = PyMem_Malloc(n_coins * sizeof *coins);
    es_judged *judged = PyMem_Malloc(n_coins * sizeof *judged);
    if (!coins || !judged) {
        PyErr_NoMemory();
        goto done;
    }
    if ((size_t)PyList_Size(coin_list) != n_coins) {
        PyErr_Format(PyExc_ValueError, "coins: expected %zu", n_coins);
        goto done;
    }
    for (size_t i = 0; i < n_coins; i++) {
        PyObject *coin = PyList_GetItem(coin_list, (Py_ssize_t)i);
        coins[i] = coin ? PyFloat_AsDouble(coin) : -1.0;
        if (PyErr_Occurred()) goto done;
    }
    if (enter(self) < 0) goto done;
    es_status status;
    es_verdict verdict;
    Py_BEGIN_ALLOW_THREADS
    status = es_verify(self->sampler, &views.draft, block ? ES_BLOCK : ES_CHAIN, coins, &verdict, judged);
    Py_END_ALLOW_THREADS
    self->busy = false;
    result = status == ES_OK ? Py_BuildValue("niN", (Py_ssize_t)verdict.n_accepted, (int)verdict.next_token,
                                             list_of_judged(judged, verdict.n_accepted, views.draft.n))
                             : raise_status(status);
done:
    PyMem_Free(judged);
    PyMem_Free(coins);
    release_draft(&views);
    return result;
}

static PyObject *sampler_acceptance(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    PyObject *rows, *tokens, *prefix;
    int block;
    if (!PyArg_ParseTuple(args, "OOOp:acceptance", &rows, &tokens, &prefix, &block)) return NULL;
    draft_views views;
    if (get_draft(self->sampler, rows, tokens, prefix, &views) < 0) return NULL;
    PyObject *result = NULL;
    const size_t n = views.draft.n;
    double *figures = PyMem_Malloc((2 * n + 1) * sizeof *figures);
    if (!figures) {
        PyErr_NoMemory();
    } else if (enter(self) == 0) {
        const es_status status =
            es_acceptance(self->sampler, &views.draft, block ? ES_BLOCK : ES_CHAIN, figures, figures + n);
        self->busy = false;
        result = status == ES_OK ? Py_BuildValue("NN", list_of(figures, n), list_of(figures + n, n + 1))
                                 : raise_status(status);
    }
    PyMem_Free(figures);
    release_draft(&views);
    return result;
}

static PyObject *sampler_next_probs(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    PyObject *rows, *tokens, *prefix, *out;
    Py_ssize_t tau;
    double weight;
    if (!PyArg_ParseTuple(args, "OOOndO:next_probs", &rows, &tokens, &prefix, &tau, &weight, &out)) return NULL;
    draft_views views;
    if (get_draft(self->sampler, rows, tokens, prefix, &views) < 0) return NULL;
    PyObject *result = NULL;
    if (tau < 0) {
        raise_status(ES_BAD_LENGTH);
    } else if (enter(self) == 0) {
        const es_dist *next;
        const es_status status = es_next(self->sampler, &views.draft, (size_t)tau, weight, &next);
        result = status == ES_OK ? write_probs(self->sampler, next, out) : raise_status(status);
        self->busy = false;
    }
    release_draft(&views);
    return result;
}

static PyMethodDef sampler_methods[] = {
    {"sample", sampler_sample, METH_VARARGS,
     "sample(row, prefix, coin, slot) -> token: filter `row` into `slot` (-1: none) and sample it."},
    {"set_probs", sampler_set_probs, METH_VARARGS, "set_probs(slot, probs): give slot these probabilities by id."},
    {"set_point", sampler_set_point, METH_VARARGS, "set_point(slot, token): give slot a point mass."},
    {"top", sampler_top, METH_VARARGS, "top(slot) -> the likeliest token of slot."},
    {"confidence", sampler_confidence, METH_O, "confidence(row) -> the likeliest token's probability, unfiltered."},
    {"probs", sampler_probs, METH_VARARGS, "probs(slot, out): write slot's probabilities by id into out."},
    {"verify", sampler_verify, METH_VARARGS,
     "verify(rows, draft, prefix, coins, block) -> (n_accepted, next_token, [(p, q), ...])"},
    {"acceptance", sampler_acceptance, METH_VARARGS,
     "acceptance(rows, draft, prefix, block) -> (accept, weight): the rule's probabilities."},
    {"next_probs", sampler_next_probs, METH_VARARGS,
     "next_probs(rows, draft, prefix, tau, weight, out): write what the next token is drawn from."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot sampler_slots[] = {
    {Py_tp_doc, "Filters, samples and verifies over logits of one vocabulary. See _core.pyi."},
    {Py_tp_new, sampler_new},
    {Py_tp_dealloc, sampler_dealloc},
    {Py_tp_methods, sampler_methods},
    {0, NULL},
};

static PyType_Spec sampler_spec = {
    .name = "edgespec._core.Sampler",
    .basicsize = sizeof(sampler_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = sampler_slots,
};

/* ---- Interrupt ---- */

typedef struct interrupt_object {
    PyObject_HEAD
    es_interrupt interrupt;
} interrupt_object;

static PyObject *interrupt_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"fd", NULL};
    int fd;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i:Interrupt", keywords, &fd)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    interrupt_object *self = (interrupt_object *)allocate(type, 0);
    if (self) self->interrupt = (es_interrupt){.fd = fd};
    return (PyObject *)self;
}

static void interrupt_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *interrupt_callback(PyObject *self, void *closure) {
    (void)self, (void)closure;
    return PyLong_FromVoidPtr((void *)(uintptr_t)&es_interrupted);
}

static PyObject *interrupt_data(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromVoidPtr(&((interrupt_object *)self)->interrupt);
}

static PyGetSetDef interrupt_getset[] = {
    {"callback", interrupt_callback, NULL, "Address of the ggml_abort_callback.", NULL},
    {"data", interrupt_data, NULL, "Address of its data; valid while this object lives.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot interrupt_slots[] = {
    {Py_tp_doc, "Ends a llama_decode when a descriptor becomes readable. See interrupt.h."},
    {Py_tp_new, interrupt_new},
    {Py_tp_dealloc, interrupt_dealloc},
    {Py_tp_getset, interrupt_getset},
    {0, NULL},
};

static PyType_Spec interrupt_spec = {
    .name = "edgespec._core.Interrupt",
    .basicsize = sizeof(interrupt_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = interrupt_slots,
};

/* ---- module ---- */

static PyObject *module_coins(PyObject *module, PyObject *args) {
    (void)module;
    unsigned long long seed, first;
    Py_ssize_t n;
    if (!PyArg_ParseTuple(args, "KKn:coins", &seed, &first, &n)) return NULL;
    if (n < 0 || n > (Py_ssize_t)1 << 24) return raise_status(ES_BAD_LENGTH);
    double *values = PyMem_Malloc((size_t)(n + 1) * sizeof *values);
    if (!values) return PyErr_NoMemory();
    es_coins(seed, first, values, (size_t)n);
    PyObject *list = list_of(values, (size_t)n);
    PyMem_Free(values);
    return list;
}

static PyObject *module_simd(PyObject *module, PyObject *args) {
    (void)module, (void)args;
    return PyUnicode_FromString(es_rows_best()->name);
}

static PyMethodDef module_methods[] = {
    {"coins", module_coins, METH_VARARGS, "coins(seed, first, n) -> n doubles in [0, 1) of that stream."},
    {"simd", module_simd, METH_NOARGS, "simd() -> name of the row kernels this CPU runs."},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    const int result = type ? PyModule_AddType(module, (PyTypeObject *)type) : -1;
    Py_XDECREF(type);
    return result;
}

static int module_exec(PyObject *module) {
    PyType_Spec *const specs[] = {&sampler_spec, &interrupt_spec, &es_suffix_spec};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++)
        if (add_type(module, specs[i]) < 0) return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)(uintptr_t)module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "edgespec._core",
    .m_doc = "The C core: filters, sampling and verification over logits.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module_def); }
