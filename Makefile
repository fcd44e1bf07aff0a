# edgespec: `make run` and `make test` are all the set-up there is. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pip compiled what is installed. The C tests are linked with the same objects: ninja is the one that pip
# took, as another version's log would have it compile all of them again.
NINJA = $(or $(shell command -v ninja),$(abspath $(BIN)/ninja))
BUILT := build/cp311-abi3-linux_$(shell uname -m)
PIP := $(BIN)/pip --disable-pip-version-check --quiet
CMAKE := $(BIN)/cmake
PACKAGES = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
C_SOURCES := CMakeLists.txt $(wildcard csrc/*.[ch] csrc/tests/*.[ch] csrc/kernels/*.h csrc/kernels/*.cpp csrc/kernels/tests/* edgespec/apps/speech/csrc/*.* edgespec/apps/speech/csrc/tests/*)

PROMPT ?= Write a quicksort in Python.
RUN ?=
SERVE ?=
TEST ?=
HOURS ?= 8
MACHINES ?= x86_64 aarch64
FORGE ?=
export PROMPT HOURS MACHINES
# Each module is compiled once, not at each start of each program: containers' images often forbid it.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help run serve images check test test-all test-c lint house types format sanitize sanitized sanitize-memory sanitize-threads bench forge models-supported wheels wheels-test release pi pi-test clean needs

help: ## Show this list
	@sed -n 's/^\([a-z0-9 -]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 25
	@echo; echo 'With settings:'
	@echo '  make run PROMPT="Why is the sky blue?" RUN="--temp 0"'
	@echo '  make serve SERVE="--port 9000"'
	@echo '  make test TEST="-k name"'
	@echo '  make forge HOURS=2 FORGE="--types q4_0"'
	@echo '  make wheels MACHINES=x86_64'

run: $(VENV)/.installed ## Build, pull the default pair, write text from PROMPT
	@$(BIN)/edgespec run $(RUN) -- "$$PROMPT"

serve: $(VENV)/.installed ## Build, pull the pair, serve at http://127.0.0.1:8080
	@$(BIN)/edgespec serve $(SERVE)

images: $(VENV)/.images ## Build what reads images in prompts (1 minute)

# Threads that wait leave the processors to the other worker's instead of spinning: passive, and one for numpy.
NO_SPINNING := OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1
PYTEST := $(NO_SPINNING) $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder

check: lint ## Lint and quick tests (3 minutes): before each commit
	$(PYTEST) -q -m "not slow and not pair" $(TEST)

test: $(VENV)/.dev test-c ## Tests but the longest (pulls 1.6 GB of models)
	$(PYTEST) $(or $(TEST),-m "not long")

test-all: $(VENV)/.dev test-c ## All tests: before a release
	$(PYTEST) $(TEST)

test-c: $(BUILT)/.tests ## The C tests alone
	$(BIN)/ctest --test-dir $(BUILT) --parallel 2 --output-on-failure

lint: $(VENV)/.dev house types ## Check style, types, order of imports, the house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev ## Check the types alone
	$(BIN)/mypy

house: ## Check the house rules alone (docs/development.md)
	$(PYTHON) lint_house.py

format: $(VENV)/.dev ## Format the Python code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One build for the C tests and for Python's. -S and -P keep the installed edgespec out, so that the one in
# build/sanitize-py is found. Python leaks at exit by itself: leaks are looked for in the C tests only. What
# has no memory is to be told so, not ended. libstdc++ comes first too: ASan looks for its throw when it starts. SANITIZED: statistics are drawn from fewer samples.
sanitize: sanitize-memory sanitize-threads ## Tests of C code under ASan, UBSan and TSan (gcc)
	@$(SOURCES_OF_C) | sha256sum > .ci/sanitized

SOURCES_OF_C = cat CMakeLists.txt $$(git ls-files csrc edgespec/apps/speech/csrc)
sanitized: ## Whether no C has changed since `make sanitize` passed
	@$(SOURCES_OF_C) | sha256sum --check --status .ci/sanitized

sanitize-memory: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) install --no-build-isolation --no-deps --upgrade \
		--target build/sanitize-py -C build-dir=build/sanitize \
		-C cmake.define.EDGESPEC_SANITIZE=address,undefined -C cmake.define.EDGESPEC_TESTS=ON \
		-C "cmake.define.EDGESPEC_GGML_INCLUDE=$(PACKAGES)/include" .
	$(BIN)/ctest --test-dir build/sanitize --parallel 2 --output-on-failure
	SANITIZED=1 $(NO_SPINNING) LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		PYTHONPATH="$(CURDIR)/build/sanitize-py:$(PACKAGES)" \
		$(BIN)/python -P -S -m pytest -q -p no:cacheprovider -m "not pair" \
		--dist loadgroup --tx '2*popen//python=$(abspath $(BIN))/python -P -S' tests/decoding/test_twins.py tests/decoding/test_lossless.py \
		tests/decoding/test_tree_verify.py tests/drafting/test_suffix.py tests/llama/test_kernels.py tests/llama/test_eight_bit_matrix.py tests/llama/test_kernels_states.py \
		tests/llama/test_kernel_states.py tests/llama/test_kernels_models.py tests/apps/speech/test_whisper_model.py

sanitize-threads: $(VENV)/.dev
	$(CMAKE) -S . -B build/sanitize-threads -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) \
		-DEDGESPEC_TESTS=ON -DEDGESPEC_SANITIZE=thread >/dev/null
	$(CMAKE) --build build/sanitize-threads --target test_threads test_hidden
	$(BIN)/ctest --test-dir build/sanitize-threads --output-on-failure -R 'kernels_(threads|hidden)'

bench: $(VENV)/.dev ## Measure (10 minutes, keep the machine quiet)
	$(BIN)/edgespec models pull default qwen2.5-coder-0.5b-q4_0
	$(BIN)/python bench/verify_cost.py
	$(BIN)/python bench/speed.py

# What is stopped goes on when it is called again (docs/drafts.md).
forge: $(VENV)/.forge ## Train a draft for HOURS hours, keep it if it is faster
	@$(BIN)/edgespec draft make --hours $(HOURS) $(FORGE)

models-supported: $(VENV)/.installed ## Check each architecture, write docs/models-supported.md
	@$(BIN)/python tests/support/models_supported.py

wheels: $(VENV)/.pi ## Build wheels for MACHINES into dist/ (docs/start.md)
	@$(BIN)/python -m pi.manylinux $(MACHINES)

wheels-test: $(VENV)/.pi ## Try them in Debian roots without a compiler (as root)
	@$(BIN)/python -m pi.bare $(MACHINES)

release: $(VENV)/.pi ## Wheels of a tagged commit, sums, notes in dist/release
	@$(BIN)/python -m pi.manylinux $(MACHINES)
	@$(BIN)/python -m pi.release $(MACHINES)

pi: $(VENV)/.pi ## Build wheels for Raspberry Pis (docs/start.md)
	@$(BIN)/python -m pi.manylinux aarch64

pi-test: $(VENV)/.pi ## Try them under qemu, with tests of the kernels
	@$(BIN)/python -m pi.bare aarch64

clean: ## Remove all that was built; models and llama.cpp stay
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find edgespec bench pi tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- what the targets above stand on ----

# Before anything is installed: what the targets need of this machine (pi/needs.py).
needs:
	@command -v $(PYTHON) >/dev/null || { echo "edgespec: no $(PYTHON); apt install python3 python3-venv python3-dev" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "edgespec: $$($(PYTHON) --version) is too old: 3.11 or newer is needed; try make PYTHON=python3.12" >&2; exit 1; }
	@CC="$(CC)" $(PYTHON) -m pi.needs $(MAKECMDGOALS)

$(BIN)/python: | needs
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# What is pulled meanwhile: the default pair, where that is what will be run.
MEANWHILE := $(if $(filter run serve test test-all bench forge,$(MAKECMDGOALS)),default)
MEANWHILE := $(if $(filter -p% -t% -d% --pair% --target% --draft% --gamma% --help,$(RUN) $(SERVE) $(FORGE))$(TEST),,$(MEANWHILE))

# The first time pip compiles llama.cpp for this CPU (about 2 minutes on 2 cores) and keeps the wheel.
$(VENV)/.installed: $(BIN)/python pyproject.toml install.py llama_cpp.cmake $(C_SOURCES)
	@echo "edgespec: installing into $(VENV); where no wheel in dist/ fits, llama.cpp is compiled once, some minutes"
	-@cmp -s llama_cpp.cmake "$(PACKAGES)/llama_cpp/lib/llama_cpp.cmake" || \
		$(PIP) uninstall --yes llama-cpp-python 2>/dev/null # pip would leave one that was compiled with another file
	-@$(PIP) uninstall --yes edgespec 2>/dev/null # an older one would be imported instead, with modules that have moved
	@$(PIP) install rich huggingface-hub packaging msgspec # which show and pull while pip installs the rest
	@$(BIN)/python install.py $(MEANWHILE)
	@touch $@

$(VENV)/.images: $(VENV)/.installed images.cmake pi/mtmd.cmake pi/images.py
	$(PIP) install 'edgespec[images]' cmake ninja
	@$(BIN)/python -m pi.images
	@touch $@

$(VENV)/.forge: $(VENV)/.installed
	$(PIP) install 'edgespec[forge]' # what it needs: a second installation would compile all of it again
	@touch $@

$(VENV)/.dev: $(VENV)/.images
	@grep -qs '"editable"' "$(PACKAGES)"/edgespec-*.dist-info/direct_url.json || { echo "edgespec: installed from dist/," \
		"as no compiler was here; to develop it: apt install gcc g++ python3-dev, rm -r $(VENV)" >&2; exit 1; }
	-@$(PIP) install uv # a quarter of pip's time, but it knows no pip.conf
	$(BIN)/uv pip install --quiet --python $(BIN)/python 'edgespec[dev]' || $(PIP) install --no-compile 'edgespec[dev]'
	@touch $@

$(VENV)/.pi: $(VENV)/.dev
	$(PIP) install 'edgespec[dev,pi]'
	@touch $@

$(BUILT)/.tests: $(VENV)/.dev
	$(CMAKE) -S . -B $(BUILT) -G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA) -DEDGESPEC_TESTS=ON \
		"-DEDGESPEC_GGML_INCLUDE=$(PACKAGES)/include" >/dev/null
	$(CMAKE) --build $(BUILT)
	@touch $@
