/* The Python binding of suffix.h. */
#include "module.h"

#include "suffix.h"

typedef struct suffix_object {
    PyObject_HEAD
    es_suffix *store;
    bool busy;
} suffix_object;

static int enter(suffix_object *self) { return take_turn(&self->busy, "SuffixStore"); }

static PyObject *suffix_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"capacity", NULL};
    Py_ssize_t capacity;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n:SuffixStore", keywords, &capacity)) return NULL;
    if (capacity < 1 || capacity > ES_SUFFIX_LARGEST)
        return PyErr_Format(PyExc_ValueError, "capacity must be 1..%d", ES_SUFFIX_LARGEST);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    suffix_object *self = (suffix_object *)allocate(type, 0);
    if (!self) return NULL;
    self->busy = false;
    self->store = es_suffix_new((size_t)capacity);
    if (!self->store) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void suffix_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    es_suffix_free(((suffix_object *)object)->store);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *suffix_extend(PyObject *object, PyObject *args) {
    suffix_object *self = (suffix_object *)object;
    PyObject *tokens_object;
    long long position = 0; /* one below 0 becomes one that is yet to come */
    if (!PyArg_ParseTuple(args, "O|L:extend", &tokens_object, &position)) return NULL;
    Py_buffer tokens;
    if (get_buffer(tokens_object, &tokens, 'i', "tokens", 0) < 0) return NULL;
    uint64_t document = (uint64_t)position;
    bool is_last = false, extended = false;
    const bool entered = enter(self) == 0;
    if (entered) {
        Py_BEGIN_ALLOW_THREADS
        is_last = es_suffix_is_last(self->store, document);
        extended = es_suffix_extend(self->store, &document, tokens.buf, n_elements(&tokens));
        Py_END_ALLOW_THREADS
        self->busy = false;
    }
    PyBuffer_Release(&tokens);
    if (!entered) return NULL;
    if (!is_last) return PyErr_Format(PyExc_ValueError, "document: none ends at position %lld", position);
    if (!extended) return PyErr_Format(PyExc_ValueError, "tokens: one is below %d", ES_SUFFIX_END);
    return PyLong_FromUnsignedLongLong(document);
}

static PyObject *suffix_clear(PyObject *object, PyObject *args) {
    (void)args;
    suffix_object *self = (suffix_object *)object;
    if (enter(self) < 0) return NULL;
    es_suffix_clear(self->store);
    self->busy = false;
    Py_RETURN_NONE;
}

/* Keeps the GIL: a proposal takes less time than giving it away could cost. */
static PyObject *suffix_propose(PyObject *object, PyObject *args) {
    suffix_object *self = (suffix_object *)object;
    PyObject *tail_object;
    Py_ssize_t max, branches;
    if (!PyArg_ParseTuple(args, "Onn:propose", &tail_object, &max, &branches)) return NULL;
    if (max < 0 || max > ES_SUFFIX_LONGEST)
        return PyErr_Format(PyExc_ValueError, "max must be 0..%d", ES_SUFFIX_LONGEST);
    if (branches < 1 || branches > ES_SUFFIX_MOST)
        return PyErr_Format(PyExc_ValueError, "branches must be 1..%d", ES_SUFFIX_MOST);
    Py_buffer tail;
    if (get_buffer(tail_object, &tail, 'i', "tail", 0) < 0) return NULL;
    const bool entered = enter(self) == 0;
    es_suffix_node nodes[ES_SUFFIX_LONGEST];
    size_t n = 0;
    if (entered) {
        n = es_suffix_propose(self->store, tail.buf, n_elements(&tail), (size_t)max, (size_t)branches, nodes);
        self->busy = false;
    }
    PyBuffer_Release(&tail);
    if (!entered) return NULL;

    int32_t tokens[ES_SUFFIX_LONGEST], parents[ES_SUFFIX_LONGEST];
    double probs[ES_SUFFIX_LONGEST];
    for (size_t i = 0; i < n; i++) {
        tokens[i] = nodes[i].token;
        parents[i] = nodes[i].parent;
        probs[i] = (double)nodes[i].prob;
    }
    return Py_BuildValue("NNN", list_of_ints(tokens, n), list_of_ints(parents, n), list_of(probs, n));
}

static PyObject *suffix_check(PyObject *object, PyObject *args) {
    (void)args;
    suffix_object *self = (suffix_object *)object;
    if (enter(self) < 0) return NULL;
    bool whole;
    Py_BEGIN_ALLOW_THREADS
    whole = es_suffix_check(self->store);
    Py_END_ALLOW_THREADS
    self->busy = false;
    return PyBool_FromLong(whole);
}

static Py_ssize_t suffix_length(PyObject *object) {
    suffix_object *self = (suffix_object *)object;
    if (enter(self) < 0) return -1; /* extend() is changing it */
    const size_t size = es_suffix_size(self->store);
    self->busy = false;
    return (Py_ssize_t)size;
}

static PyObject *suffix_n_bytes(PyObject *object, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(es_suffix_bytes(((suffix_object *)object)->store));
}

static PyMethodDef suffix_methods[] = {
    {"extend", suffix_extend, METH_VARARGS,
     "extend(tokens, document=0) -> document: append them to it, or to a new one; -1 ends a document."},
    {"clear", suffix_clear, METH_NOARGS, "clear(): forget all tokens."},
    {"propose", suffix_propose, METH_VARARGS,
     "propose(tail, max, branches) -> (tokens, parents, probs): a tree of continuations of tail."},
    {"check", suffix_check, METH_NOARGS, "check() -> whether every invariant of the store holds."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef suffix_getset[] = {
    {"n_bytes", suffix_n_bytes, NULL, "Memory that the store takes; it never changes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot suffix_slots[] = {
    {Py_tp_doc, "Remembers texts that grow and proposes continuations. See _core.pyi."},
    {Py_tp_new, suffix_new},
    {Py_tp_dealloc, suffix_dealloc},
    {Py_tp_methods, suffix_methods},
    {Py_tp_getset, suffix_getset},
    {Py_sq_length, suffix_length},
    {0, NULL},
};

PyType_Spec es_suffix_spec = {
    .name = "edgespec._core.SuffixStore",
    .basicsize = sizeof(suffix_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = suffix_slots,
};
