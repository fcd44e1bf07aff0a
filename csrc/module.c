/* Python bindings of the C core, and nothing else.  Limited API: one wheel for Python >= 3.11.
 *
 * Arrays come in through the buffer protocol, are used in place and have their type and length
 * checked here and in its neighbours; the core runs without the GIL. */
#include "module.h"

#include "fnv.h"
#include "interrupt.h"
#include "philox.h"
#include "product.h"
#include "rows.h"

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

static PyObject *interrupt_fd(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(((interrupt_object *)self)->interrupt.fd);
}

static PyGetSetDef interrupt_getset[] = {
    {"callback", interrupt_callback, NULL, "Address of the ggml_abort_callback.", NULL},
    {"data", interrupt_data, NULL, "Address of its data; valid while this object lives.", NULL},
    {"fd", interrupt_fd, NULL, "The descriptor.", NULL},
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
    if (n < 0 || n > (Py_ssize_t)1 << 24) return PyErr_Format(PyExc_ValueError, "n must be 0..2^24");
    double *values = PyMem_Malloc((size_t)(n + 1) * sizeof *values);
    if (!values) return PyErr_NoMemory();
    es_coins(seed, first, values, (size_t)n);
    PyObject *list = list_of(values, (size_t)n);
    PyMem_Free(values);
    return list;
}

static PyObject *module_fnv1a(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *data_object;
    unsigned long long hash = ES_FNV_BASIS;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "O|K:fnv1a", &data_object, &hash)) return NULL;
    if (PyObject_GetBuffer(data_object, &data, PyBUF_C_CONTIGUOUS) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    hash = es_fnv1a(data.buf, (size_t)data.len, hash);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(hash);
}

static PyObject *module_simd(PyObject *module, PyObject *args) {
    (void)module, (void)args;
    return PyUnicode_FromString(es_rows_best()->name);
}

/* Whether the three arrays fit together: vectors (n, columns) and out (n, rows), the matrix of Q8_0. */
static bool fits_product(const Py_buffer *matrix, const Py_buffer *vectors, const Py_buffer *out) {
    if (vectors->ndim != 2 || out->ndim != 2 || vectors->shape[0] != out->shape[0]) return false;
    const Py_ssize_t n_rows = out->shape[1], n_blocks = vectors->shape[1] / ES_Q8_COLUMNS;
    if (vectors->shape[1] % ES_Q8_COLUMNS) return false;
    if (n_rows && n_blocks > PY_SSIZE_T_MAX / ES_Q8_BYTES / n_rows) return false;
    return matrix->len == n_rows * n_blocks * ES_Q8_BYTES;
}

static PyObject *module_multiply(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *matrix_object, *vectors_object, *out_object, *result = NULL;
    Py_buffer matrix, vectors, out;
    if (!PyArg_ParseTuple(args, "OOO:multiply", &matrix_object, &vectors_object, &out_object)) return NULL;
    if (PyObject_GetBuffer(matrix_object, &matrix, PyBUF_C_CONTIGUOUS) < 0) return NULL;
    if (get_buffer(vectors_object, &vectors, 'f', "vectors", 0) < 0) goto release_matrix;
    if (get_buffer(out_object, &out, 'f', "out", PyBUF_WRITABLE) < 0) goto release_vectors;
    if (fits_product(&matrix, &vectors, &out)) {
        Py_BEGIN_ALLOW_THREADS
        es_product_best()->multiply(matrix.buf, (size_t)out.shape[1], (size_t)vectors.shape[1], vectors.buf,
                                    (size_t)vectors.shape[0], out.buf);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    } else {
        PyErr_SetString(PyExc_ValueError, "matrix, vectors and out do not fit together");
    }
    PyBuffer_Release(&out);
release_vectors:
    PyBuffer_Release(&vectors);
release_matrix:
    PyBuffer_Release(&matrix);
    return result;
}

static PyMethodDef module_methods[] = {
    {"coins", module_coins, METH_VARARGS, "coins(seed, first, n) -> n doubles in [0, 1) of that stream."},
    {"fnv1a", module_fnv1a, METH_VARARGS,
     "fnv1a(data, hash=basis) -> FNV-1a hash, 64 bits, of what `hash` is of, followed by data."},
    {"multiply", module_multiply, METH_VARARGS,
     "multiply(matrix, vectors, out): write a Q8_0 matrix times each of the vectors into out."},
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
    PyType_Spec *const specs[] = {&es_sampler_spec, &interrupt_spec, &es_suffix_spec};
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
