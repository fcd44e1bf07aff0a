/* What the files of the Python binding share: arguments that are arrays, lists as results, and turns.
 * Static inline, because an extension module exports nothing but its init function. */
#ifndef EDGESPEC_MODULE_H
#define EDGESPEC_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

extern PyType_Spec es_sampler_spec; /* module_sampler.c */
extern PyType_Spec es_suffix_spec;  /* module_suffix.c */

/* Gets a C-contiguous buffer of 4-byte elements of the given kind ('f' or 'i'). */
static inline int get_buffer(PyObject *object, Py_buffer *view, char kind, const char *name, int flags) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0) return -1;
    const char *format = view->format ? view->format : "B";
    if (*format == '<' || *format == '=' || *format == '@') format++;
    const bool right_kind = kind == 'f' ? *format == 'f' : *format == 'i' || *format == 'l';
    if (!right_kind || format[1] != '\0' || view->itemsize != 4) {
        PyErr_Format(PyExc_TypeError, "%s: expected 4-byte elements of kind '%c', got '%s'", name, kind,
                     view->format ? view->format : "B");
        PyBuffer_Release(view);
        return -1;
    }
    if (view->len && (uintptr_t)view->buf % 4) { /* a packed record's field, or bytes from an odd offset */
        PyErr_Format(PyExc_TypeError, "%s: the elements are not aligned in memory", name);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static inline size_t n_elements(const Py_buffer *view) { return (size_t)(view->len / view->itemsize); }

static inline PyObject *list_of(const double *values, size_t n) {
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (!value || PyList_SetItem(list, (Py_ssize_t)i, value) < 0) Py_CLEAR(list);
    }
    return list;
}

static inline PyObject *list_of_ints(const int32_t *values, size_t n) {
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list && i < n; i++) {
        PyObject *value = PyLong_FromLong(values[i]);
        if (!value || PyList_SetItem(list, (Py_ssize_t)i, value) < 0) Py_CLEAR(list);
    }
    return list;
}

/* Objects whose core runs without the GIL and is not re-entrant have a flag, read and written under the
 * GIL.  Sets it, or raises when another thread did. */
static inline int take_turn(bool *busy, const char *name) {
    if (*busy) {
        PyErr_Format(PyExc_RuntimeError, "this %s is in use in another thread", name);
        return -1;
    }
    *busy = true;
    return 0;
}

#endif
