/* What the two files of the Python class Sampler share. */
#ifndef EDGESPEC_MODULE_SAMPLER_H
#define EDGESPEC_MODULE_SAMPLER_H

#include "module.h"
#include "sampler.h"

typedef struct sampler_object {
    PyObject_HEAD
    es_sampler *sampler;
    bool busy; /* read and written under the GIL; the core runs without it and is not re-entrant */
} sampler_object;

static inline int es_enter(sampler_object *self) { return take_turn(&self->busy, "Sampler"); }

/* Raises what a status other than ES_OK means; returns NULL. */
PyObject *es_raise(es_status status);

/* Writes a distribution by token id, normalised, into out[n_vocab] and returns None. */
PyObject *es_write_probs(const es_sampler *sampler, const es_dist *dist, PyObject *out);

/* Methods, in module_verify.c. */
PyObject *es_sampler_verify(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *es_sampler_outcome(PyObject *self, PyObject *args, PyObject *kwargs);

#endif
