/* The Python binding of verify.h: two methods of Sampler. */
#include "module_sampler.h"

#include "verify.h"

enum { ROWS, TOKENS, PARENTS, SLOTS, PREFIX, N_VIEWS };

/* The views behind an es_draft. */
typedef struct draft_views {
    Py_buffer views[N_VIEWS];
    es_draft draft;
} draft_views;

static void release(draft_views *v, size_t n_views) {
    while (n_views-- > 0) PyBuffer_Release(&v->views[n_views]);
}

static int get_draft(const es_sampler *s, PyObject *const objects[N_VIEWS], draft_views *v) {
    static const char *const names[N_VIEWS] = {"rows", "tokens", "parents", "slots", "prefix"};
    for (size_t i = 0; i < N_VIEWS; i++)
        if (get_buffer(objects[i], &v->views[i], i == ROWS ? 'f' : 'i', names[i], 0) < 0) {
            release(v, i);
            return -1;
        }
    const size_t n = n_elements(&v->views[TOKENS]);
    v->draft = (es_draft){
        .tokens = v->views[TOKENS].buf,
        .parents = v->views[PARENTS].buf,
        .slots = v->views[SLOTS].buf,
        .n = n,
        .rows = v->views[ROWS].buf,
        .n_rows = n_elements(&v->views[ROWS]) / s->n_vocab,
        .prefix = v->views[PREFIX].buf,
        .n_prefix = n_elements(&v->views[PREFIX]),
    };
    if (n_elements(&v->views[ROWS]) != (n + 1) * s->n_vocab) {
        PyErr_Format(PyExc_ValueError, "rows: expected %zu of %zu logits", n + 1, s->n_vocab);
    } else if (n_elements(&v->views[PARENTS]) != n || n_elements(&v->views[SLOTS]) != n) {
        PyErr_Format(PyExc_ValueError, "parents and slots: expected %zu of each, one for a token", n);
    } else {
        return 0;
    }
    release(v, N_VIEWS);
    return -1;
}

static int get_rule(int block, double lenience, es_rule *rule) {
    if (!(lenience > 0.0 && lenience <= 1.0)) {
        PyErr_SetString(PyExc_ValueError, "lenience must be above 0 and at most 1");
        return -1;
    }
    if (block && lenience < 1.0) {
        PyErr_SetString(PyExc_ValueError, "the block rule has no lenience");
        return -1;
    }
    *rule = (es_rule){.block = block, .lenience = lenience};
    return 0;
}

static PyObject *list_of_judged(const es_judged *judged, size_t n) {
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *entry = Py_BuildValue("idd", (int)judged[i].node, judged[i].p, judged[i].q);
        if (!entry || PyList_SetItem(list, (Py_ssize_t)i, entry) < 0) Py_CLEAR(list);
    }
    return list;
}

PyObject *es_sampler_verify(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"rows",  "tokens", "parents",  "slots", "prefix",
                               "coins", "block",  "lenience", NULL};
    sampler_object *self = (sampler_object *)object;
    PyObject *o[N_VIEWS], *coin_list;
    int block;
    double lenience = 1.0;
    es_rule rule;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO!p|$d:verify", keywords, &o[ROWS], &o[TOKENS], &o[PARENTS],
                                     &o[SLOTS], &o[PREFIX], &PyList_Type, &coin_list, &block, &lenience))
        return NULL;
    draft_views views;
    if (get_rule(block, lenience, &rule) < 0 || get_draft(self->sampler, o, &views) < 0) return NULL;
    PyObject *result = NULL;
    const size_t n_coins = views.draft.n + 1;
    double *coins = PyMem_Malloc(n_coins * sizeof *coins);
    if (!coins) {
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
    if (es_enter(self) < 0) goto done;
    es_status status;
    es_verdict verdict;
    Py_BEGIN_ALLOW_THREADS
    status = es_verify(self->sampler, &views.draft, rule, coins, &verdict);
    Py_END_ALLOW_THREADS
    if (status == ES_OK) {
        result = Py_BuildValue("NiN", list_of_ints(verdict.path, verdict.n_accepted), (int)verdict.next_token,
                               list_of_judged(verdict.judged, verdict.n_judged));
    } else {
        es_raise(status);
    }
    self->busy = false;
done:
    PyMem_Free(coins);
    release(&views, N_VIEWS);
    return result;
}

PyObject *es_sampler_outcome(PyObject *object, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"rows",  "tokens", "parents", "slots",    "prefix",
                               "block", "end",    "out",     "lenience", NULL};
    sampler_object *self = (sampler_object *)object;
    PyObject *o[N_VIEWS], *out;
    int block, end;
    double lenience = 1.0;
    es_rule rule;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOpiO|$d:outcome", keywords, &o[ROWS], &o[TOKENS],
                                     &o[PARENTS], &o[SLOTS], &o[PREFIX], &block, &end, &out, &lenience))
        return NULL;
    draft_views views;
    if (get_rule(block, lenience, &rule) < 0 || get_draft(self->sampler, o, &views) < 0) return NULL;
    PyObject *result = NULL;
    if (es_enter(self) == 0) {
        double chance;
        const es_dist *next;
        const es_status status = es_outcome(self->sampler, &views.draft, rule, end, &chance, &next);
        PyObject *written = status == ES_OK ? es_write_probs(self->sampler, next, out) : es_raise(status);
        if (written) result = PyFloat_FromDouble(chance);
        Py_XDECREF(written);
        self->busy = false;
    }
    release(&views, N_VIEWS);
    return result;
}
