/* The Python binding of sampler.h; verify.h's is in module_verify.c. */
#include "module_sampler.h"

#include <math.h>
#include <string.h>

PyObject *es_raise(es_status status) {
    switch (status) {
    case ES_NOT_FINITE:
        PyErr_SetString(PyExc_ArithmeticError, "a logit or probability is not a finite number");
        break;
    case ES_NO_TOKEN:
        PyErr_SetString(PyExc_ArithmeticError, "no token has a probability above 0");
        break;
    case ES_BAD_TREE:
        PyErr_SetString(PyExc_ValueError, "parents: not a tree in depth-first order");
        break;
    case ES_NOT_DRAWN:
        PyErr_SetString(PyExc_ValueError, "slots: a node's token has no probability in its slot");
        break;
    default:
        PyErr_SetString(PyExc_ValueError, "a length or index is outside what this Sampler was made for");
    }
    return NULL;
}

/* Whether these are sequences of tokens of the vocabulary, each ended by -1; else raises. */
static bool are_breakers(const int32_t *all, size_t n, Py_ssize_t n_vocab) {
    bool good = n == 0 || (n <= INT32_MAX && all[0] >= 0 && all[n - 1] == -1);
    for (size_t i = 0; i < n && good; i++)
        good = all[i] < n_vocab && (all[i] >= 0 || (all[i] == -1 && all[i - 1] >= 0));
    if (!good) PyErr_SetString(PyExc_ValueError, "dry_breakers: not sequences of tokens that end with -1");
    return good;
}

static PyObject *sampler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"n_vocab", "n_slots", "temperature", "top_k", "top_p", "min_p", "typical_p",
                               "penalty_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty",
                               "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
                               "dry_breakers", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range",
                               "dynatemp_exponent", "seed", "logit_bias", NULL};
    Py_ssize_t n_vocab, n_slots;
    unsigned long long seed;
    es_params params = {0};
    PyObject *bias = NULL, *breakers_object;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "nn$fifffifffffiiOfffffKO!:Sampler", keywords, &n_vocab, &n_slots, &params.temperature,
            &params.top_k, &params.top_p, &params.min_p, &params.typical_p, &params.penalty_last_n,
            &params.repeat_penalty, &params.frequency_penalty, &params.presence_penalty, &params.dry_multiplier,
            &params.dry_base, &params.dry_allowed_length, &params.dry_penalty_last_n, &breakers_object,
            &params.top_n_sigma, &params.xtc_probability, &params.xtc_threshold, &params.dynatemp_range,
            &params.dynatemp_exponent, &seed, &PyDict_Type, &bias))
        return NULL;
    if (!bias) {
        PyErr_SetString(PyExc_TypeError, "Sampler() takes every sampling parameter");
        return NULL;
    }
    if (n_vocab < 1 || n_vocab > INT32_MAX || n_slots < 0 || n_slots > 4096) {
        PyErr_SetString(PyExc_ValueError, "n_vocab must be 1..2^31-1 and n_slots 0..4096");
        return NULL;
    }
    if (params.dry_allowed_length < 0) {
        PyErr_SetString(PyExc_ValueError, "dry_allowed_length must be 0 or more");
        return NULL;
    }
    Py_buffer breakers;
    if (get_buffer(breakers_object, &breakers, 'i', "dry_breakers", 0) < 0) return NULL;
    if (!are_breakers(breakers.buf, n_elements(&breakers), n_vocab)) {
        PyBuffer_Release(&breakers);
        return NULL;
    }
    params.seed = seed;
    params.dry_breakers = breakers.buf;
    params.n_dry_breakers = n_elements(&breakers);

    /* A list of our own: converting an entry can run Python code, which could change the dict. */
    PyObject *entries = PyDict_Items(bias);
    if (!entries) {
        PyBuffer_Release(&breakers);
        return NULL;
    }
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
    PyBuffer_Release(&breakers);
    return (PyObject *)self;
}

static void sampler_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    es_sampler_free(((sampler_object *)object)->sampler);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/* The distribution that a Python caller names: a slot's index, or -1 for the target's. */
static es_dist *dist_at(es_sampler *s, Py_ssize_t slot) {
    if (slot == -1) return s->target;
    if (slot >= 0 && (size_t)slot < s->n_slots) return &s->slots[slot];
    PyErr_Format(PyExc_ValueError, "slot %zd: this Sampler has %zu", slot, s->n_slots);
    return NULL;
}

/* Gets the ids beside a row, as many as it has entries; without any (NULL, None) `ids->buf` is NULL. */
static int get_ids(PyObject *object, const Py_buffer *row, Py_buffer *ids) {
    *ids = (Py_buffer){0};
    if (!object || object == Py_None) return 0;
    if (get_buffer(object, ids, 'i', "ids", 0) < 0) return -1;
    if (n_elements(ids) == n_elements(row)) return 0;
    PyBuffer_Release(ids);
    es_raise(ES_BAD_LENGTH);
    return -1;
}

static PyObject *sampler_sample(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    PyObject *row_object, *prefix_object, *ids_object = NULL, *result = NULL;
    double coin, ratio = 1.0;
    Py_ssize_t slot;
    if (!PyArg_ParseTuple(args, "OOdn|Od:sample", &row_object, &prefix_object, &coin, &slot, &ids_object, &ratio))
        return NULL;
    if (!(ratio > 0.0 && ratio < INFINITY)) {
        PyErr_SetString(PyExc_ValueError, "ratio must be above 0");
        return NULL;
    }
    es_dist *dist = dist_at(self->sampler, slot);
    if (!dist) return NULL;
    Py_buffer row, prefix, ids;
    if (get_buffer(row_object, &row, 'f', "row", 0) < 0) return NULL;
    if (get_buffer(prefix_object, &prefix, 'i', "prefix", 0) < 0) goto release_row;
    if (get_ids(ids_object, &row, &ids) < 0) goto release_prefix;
    if (es_enter(self) == 0) {
        es_status status;
        int32_t token = -1;
        const size_t n = n_elements(&row), n_prefix = n_elements(&prefix);
        Py_BEGIN_ALLOW_THREADS
        status = es_filter_draft(self->sampler, row.buf, ids.buf, n, ratio, prefix.buf, n_prefix, dist);
        if (status == ES_OK) token = es_dist_sample(dist, coin);
        Py_END_ALLOW_THREADS
        self->busy = false;
        result = status == ES_OK ? PyLong_FromLong(token) : es_raise(status);
    }
    if (ids.obj) PyBuffer_Release(&ids);
release_prefix:
    PyBuffer_Release(&prefix);
release_row:
    PyBuffer_Release(&row);
    return result;
}

static PyObject *sampler_adjusted(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    PyObject *row_object, *prefix_object, *tokens, *result = NULL;
    if (!PyArg_ParseTuple(args, "OOO!:adjusted", &row_object, &prefix_object, &PyList_Type, &tokens)) return NULL;
    Py_buffer row, prefix;
    if (get_buffer(row_object, &row, 'f', "row", 0) < 0) return NULL;
    if (get_buffer(prefix_object, &prefix, 'i', "prefix", 0) < 0) goto release_row;
    const size_t n = n_elements(&row);
    const Py_ssize_t n_tokens = PyList_Size(tokens);
    if (es_enter(self) == 0) {
        const float *adjusted = NULL;
        const es_status status = es_adjust(self->sampler, row.buf, n, prefix.buf, n_elements(&prefix), &adjusted);
        result = status == ES_OK ? PyList_New(n_tokens) : es_raise(status);
        for (Py_ssize_t i = 0; result && i < n_tokens; i++) {
            const long token = PyLong_AsLong(PyList_GetItem(tokens, i));
            const bool fits = token >= 0 && (size_t)token < n;
            if (!fits && !PyErr_Occurred()) es_raise(ES_BAD_LENGTH);
            PyObject *logit = fits ? PyFloat_FromDouble((double)adjusted[token]) : NULL;
            if (!logit) Py_CLEAR(result);
            else PyList_SetItem(result, i, logit);
        }
        self->busy = false;
    }
    PyBuffer_Release(&prefix);
release_row:
    PyBuffer_Release(&row);
    return result;
}

static PyObject *sampler_set_probs(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot;
    PyObject *probs_object;
    if (!PyArg_ParseTuple(args, "nO:set_probs", &slot, &probs_object)) return NULL;
    es_dist *dist = dist_at(self->sampler, slot);
    Py_buffer probs;
    if (!dist || get_buffer(probs_object, &probs, 'f', "probs", 0) < 0) return NULL;
    const bool entered = es_enter(self) == 0;
    es_status status = ES_OK;
    if (entered) {
        status = es_dist_set(self->sampler, probs.buf, n_elements(&probs), dist);
        self->busy = false;
    }
    PyBuffer_Release(&probs);
    if (!entered) return NULL;
    if (status != ES_OK) return es_raise(status);
    Py_RETURN_NONE;
}

PyObject *es_write_probs(const es_sampler *s, const es_dist *dist, PyObject *out_object) {
    Py_buffer out;
    if (get_buffer(out_object, &out, 'f', "out", PyBUF_WRITABLE) < 0) return NULL;
    if (n_elements(&out) != s->n_vocab) {
        PyBuffer_Release(&out);
        return es_raise(ES_BAD_LENGTH);
    }
    float *values = out.buf;
    memset(values, 0, s->n_vocab * sizeof *values);
    for (size_t i = 0; i < dist->n; i++)
        values[dist->dense ? (int32_t)i : dist->ids[i]] = (float)((double)dist->probs[i] / dist->total);
    PyBuffer_Release(&out);
    Py_RETURN_NONE;
}

static PyObject *sampler_without(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot, into;
    int token;
    if (!PyArg_ParseTuple(args, "nin:without", &slot, &token, &into)) return NULL;
    const es_dist *from = dist_at(self->sampler, slot);
    es_dist *to = from ? dist_at(self->sampler, into) : NULL;
    if (!to || es_enter(self) < 0) return NULL;
    const es_status status = es_dist_without(self->sampler, from, token, to);
    self->busy = false;
    if (status != ES_OK) return es_raise(status);
    Py_RETURN_NONE;
}

static PyObject *sampler_top(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot;
    if (!PyArg_ParseTuple(args, "n:top", &slot)) return NULL;
    const es_dist *dist = dist_at(self->sampler, slot);
    if (!dist || es_enter(self) < 0) return NULL;
    PyObject *result = dist->total > 0 ? PyLong_FromLong(es_dist_top(dist)) : es_raise(ES_NO_TOKEN);
    self->busy = false;
    return result;
}

static PyObject *sampler_draw(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot;
    double coin;
    if (!PyArg_ParseTuple(args, "nd:draw", &slot, &coin)) return NULL;
    const es_dist *dist = dist_at(self->sampler, slot);
    if (!dist || es_enter(self) < 0) return NULL;
    PyObject *result = dist->total > 0 ? PyLong_FromLong(es_dist_sample(dist, coin)) : es_raise(ES_NO_TOKEN);
    self->busy = false;
    return result;
}

enum { MOST_LIKELIEST = 16 };

static PyObject *sampler_likeliest(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    PyObject *row_object, *ids_object = NULL, *result = NULL;
    Py_ssize_t k;
    if (!PyArg_ParseTuple(args, "On|O:likeliest", &row_object, &k, &ids_object)) return NULL;
    if (k < 1 || k > MOST_LIKELIEST) return es_raise(ES_BAD_LENGTH);
    Py_buffer row, of;
    if (get_buffer(row_object, &row, 'f', "row", 0) < 0) return NULL;
    if (get_ids(ids_object, &row, &of) < 0) goto release_row;
    size_t n_found = 0;
    if (es_enter(self) == 0) {
        int32_t ids[MOST_LIKELIEST];
        double probs[MOST_LIKELIEST];
        const es_status status = es_likeliest(self->sampler, row.buf, n_elements(&row), (size_t)k, ids, probs, &n_found);
        result = status == ES_OK ? PyList_New((Py_ssize_t)n_found) : es_raise(status);
        for (size_t i = 0; result && i < n_found; i++) {
            const int32_t token = of.obj ? ((const int32_t *)of.buf)[ids[i]] : ids[i];
            PyObject *pair = Py_BuildValue("id", (int)token, probs[i]);
            if (!pair) Py_CLEAR(result);
            else PyList_SetItem(result, (Py_ssize_t)i, pair);
        }
        self->busy = false;
    }
    if (of.obj) PyBuffer_Release(&of);
release_row:
    PyBuffer_Release(&row);
    return result;
}

static PyObject *sampler_probs(PyObject *object, PyObject *args) {
    sampler_object *self = (sampler_object *)object;
    Py_ssize_t slot;
    PyObject *out;
    if (!PyArg_ParseTuple(args, "nO:probs", &slot, &out)) return NULL;
    const es_dist *dist = dist_at(self->sampler, slot);
    if (!dist || es_enter(self) < 0) return NULL;
    PyObject *result = dist->total > 0 ? es_write_probs(self->sampler, dist, out) : es_raise(ES_NO_TOKEN);
    self->busy = false;
    return result;
}

static PyMethodDef sampler_methods[] = {
    {"sample", sampler_sample, METH_VARARGS,
     "sample(row, prefix, coin, slot, ids=None, ratio=1) -> token: filter `row` into `slot` (-1: none), sample it."},
    {"adjusted", sampler_adjusted, METH_VARARGS,
     "adjusted(row, prefix, tokens) -> the logits of tokens after bias, penalties, DRY and top-n-sigma."},
    {"set_probs", sampler_set_probs, METH_VARARGS, "set_probs(slot, probs): give slot these probabilities by id."},
    {"top", sampler_top, METH_VARARGS, "top(slot) -> the likeliest token of slot."},
    {"draw", sampler_draw, METH_VARARGS, "draw(slot, coin) -> a token sampled from slot."},
    {"likeliest", sampler_likeliest, METH_VARARGS,
     "likeliest(row, k, ids=None) -> [(token, probability), ...]: the k likeliest of the row itself, unfiltered."},
    {"probs", sampler_probs, METH_VARARGS, "probs(slot, out): write slot's probabilities by id into out."},
    {"without", sampler_without, METH_VARARGS,
     "without(slot, token, into): `into` becomes slot without token, normalised."},
    {"verify", (PyCFunction)(void (*)(void))es_sampler_verify, METH_VARARGS | METH_KEYWORDS,
     "verify(rows, tokens, parents, slots, prefix, coins, block, *, lenience=1.0)\n"
     "-> (path, next_token, [(node, p, q), ...])"},
    {"outcome", (PyCFunction)(void (*)(void))es_sampler_outcome, METH_VARARGS | METH_KEYWORDS,
     "outcome(rows, tokens, parents, slots, prefix, block, end, out, *, lenience=1.0) -> chance"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot sampler_slots[] = {
    {Py_tp_doc, "Filters, samples and verifies over logits of one vocabulary. See _core.pyi."},
    {Py_tp_new, sampler_new},
    {Py_tp_dealloc, sampler_dealloc},
    {Py_tp_methods, sampler_methods},
    {0, NULL},
};

PyType_Spec es_sampler_spec = {
    .name = "edgespec._core.Sampler",
    .basicsize = sizeof(sampler_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = sampler_slots,
};
