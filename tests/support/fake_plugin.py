"""Compiles stand-ins for the kernels' plugin: real shared libraries with its C interface."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = """
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

const char *es_kernels_isa(void) { return "ISA"; }
int es_kernels_set_isa(const char *name) { return strcmp(name, "ISA") ? -1 : 0; }
struct prefetch { int32_t level; int64_t bytes; };
int es_kernels_set_prefetch(struct prefetch p) { (void)p; return 0; }
int es_kernels_tiles(void) { return -1; }
int es_kernels_set_wide_from(int64_t tokens) { (void)tokens; return 0; }
void *es_kernels_device(int n_threads) { (void)n_threads; return NULL; }
void es_kernels_ask_for_weights(int on) { (void)on; }
const char *es_kernels_refusal(void) { return "REFUSAL"; }
void es_kernels_enable(int on) { (void)on; }
void es_kernels_map(int fd, int64_t offset, int64_t size) { (void)fd; (void)offset; (void)size; }
void es_kernels_want_logits(long long n) { (void)n; }
int es_kernels_keep_hidden(const void *asked) { (void)asked; return -1; }
int64_t es_kernels_n_hidden(void) { return -1; }
int64_t es_kernels_n_packed(void) { return 0; }
int NAME_OF_PACKED(int64_t i, void *out) { (void)i; (void)out; return -1; }

static const char *name(void *reg) { (void)reg; return "fake"; }
static size_t no_device(void *reg) { (void)reg; return 0; }
static struct { int version; void *get_name, *count, *get, *address, *context; } empty;

void *ggml_backend_init(void)
{
    empty.version = 2;
    empty.get_name = (void *)name;
    empty.count = (void *)no_device;
    INIT
}
"""

INITS = {
    "crashes": "raise(SIGSEGV); return NULL;",
    "is illegal": "__builtin_trap();",
    "hangs": "for (;;) pause();",
    "refuses": "return NULL;",
    "of another version": "empty.version = 1; return &empty;",
    "packs nothing": "return &empty;",
}


def compile_library(source: str, path: Path, *options: str) -> Path:
    """Compile C source into the shared library `path`."""
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def fake_plugin(
    path: Path, init: str = "packs nothing", *, isa: str = "avx2", refusal: str = "", old: bool = False
) -> Path:
    """Compile a plugin whose ggml_backend_init does `init`; an `old` one lacks a function."""
    source = SOURCE.replace("NAME_OF_PACKED", "es_kernels_old" if old else "es_kernels_packed")
    for word, text in {"ISA": isa, "REFUSAL": refusal, "INIT": INITS[init]}.items():
        source = source.replace(word, text)
    return compile_library(source, path)
