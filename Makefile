# Every target sets up what it needs in a virtual environment of its own and uses nothing else.
#   make demo        a small KDA model answers three word problems, then 100 more are marked
#   make test        the tests that need no GPU
#   make static      compile every kernel for every architecture, and compare with the lock files (minutes)
#   make lint        ruff, mypy, clang-format
#   make gpu-test    the tests that need a CUDA device
#   make sanitize    the GPU kernels under compute-sanitizer, and a fault for each of its tools to find (needs a GPU)
#   make soak        100,000 steps of continuous batching, repeated and followed in float64 (needs a GPU)
#   make bench       time the backends against the memory system's limit
#   make lock        renew the committed figures of the static proofs
#   make docs        write the pages that are generated; `make docs-performance` those that come from benchmarks/results/
#   make dist        wheel and sdist, checked, in dist/
#   make wheel-prebuilt   a wheel with kernels inside, for ARCH (sm_90a ...) and HEADS (12,24,48,96), in dist/prebuilt/
#   make kernel-hub  the package as a build for the Hugging Face `kernels` library, in build/kernel-hub/
# Variables: PYTHON (3.10 to 3.12), VENV, JOBS (test processes), TESTS (pytest's -m for `make test`), PIP_FLAGS (e.g. an
# index with CPU builds of torch).

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
TESTS ?= not gpu and not static
PIP_FLAGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS)
CUDA_SOURCES := $(wildcard src/fused_kda/kernels/cuda/*.cu)
# One thread per test process: two of them on two cores are quicker than either with two threads.
TEST_ENV := OMP_NUM_THREADS=1
# cuda-core, NVRTC, Triton and NIXL exist for Linux alone.
ifeq ($(shell uname -s),Linux)
DEV_EXTRAS := cuda,dev,plot,transfer
else
DEV_EXTRAS := dev,plot
endif

.PHONY: demo test static lint format gpu-test sanitize soak bench lock docs docs-performance dist wheel-prebuilt \
  kernel-hub clean

demo: $(VENV)/.installed
	$(BIN)/fused-kda generate "Mia has 20 nuts. Priya has 17 more nuts than Mia. How many nuts do Mia and Priya have in total?"
	$(BIN)/fused-kda generate "A farmer has 9 hens. Each hen lays 9 eggs. Sofia uses 77. How many eggs are left?"
	$(BIN)/fused-kda generate "A book has 126 pages. Lily reads 51 pages on Monday and 56 on Sunday. How many pages does she still have to read?"
	$(BIN)/fused-kda eval --limit 100 --min-exact-match 0.9

PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

test: $(VENV)/.installed-dev
	$(PYTEST) -m "$(TESTS)"

static: $(VENV)/.installed-dev
	$(PYTEST) -m static

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
ifneq ($(CUDA_SOURCES),)
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)
endif

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
ifneq ($(CUDA_SOURCES),)
	$(BIN)/clang-format -i $(CUDA_SOURCES)
endif

# The fuzz is mostly the CPU's work (drawing, compiling), so many processes share the device.
gpu-test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "gpu and not fuzz"
	$(TEST_ENV) $(BIN)/python -m pytest -m "gpu and fuzz" -n 14

lock: $(VENV)/.installed-dev
	$(BIN)/python -m fused_kda.kernels.cuda.inspect --write
	$(BIN)/python -m fused_kda.kernels.triton.inspect --write

sanitize: $(VENV)/.installed-dev
	$(BIN)/python tests/kernels/sanitize_run.py

soak: $(VENV)/.installed-dev
	$(BIN)/python -m fused_kda.testing.soak

docs: $(VENV)/.installed docs-performance
	$(BIN)/python docs/render_gates.py
	$(BIN)/python docs/render_engines.py
	$(BIN)/python docs/render_reliability.py

docs-performance: $(VENV)/.installed-dev
	$(BIN)/python docs/render_performance.py

bench: $(VENV)/.installed-dev
	$(BIN)/fused-kda bench

dist: $(VENV)/.installed-dev
	rm -rf dist/*.whl dist/*.tar.gz
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*.whl dist/*.tar.gz

# A copy of the sources takes the kernels in, so that the checkout stays as it is.
ARCH ?= sm_90a
HEADS ?= 12,24,48,96
BUILD_FLAGS ?=
STAGED := build/wheel-prebuilt

wheel-prebuilt: $(VENV)/.installed-dev
	rm -rf $(STAGED) dist/prebuilt
	mkdir -p $(STAGED)
	cp -r pyproject.toml README.md LICENSE src $(STAGED)/
	$(BIN)/fused-kda build --arch $(ARCH) --heads $(HEADS) --out $(STAGED)/src/fused_kda/prebuilt $(BUILD_FLAGS)
	$(BIN)/python -m build --no-isolation --wheel --outdir dist/prebuilt $(STAGED)
	$(BIN)/twine check --strict dist/prebuilt/*.whl

kernel-hub: $(VENV)/.installed-dev
	$(BIN)/python packaging/kernel_hub.py build/kernel-hub

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Set-up. A stamp is renewed only when the package's metadata or a pin has changed.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt setuptools
	$(PIP) -c constraints.txt --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-static.txt
	$(PIP) -c constraints.txt --no-build-isolation -e '.[$(DEV_EXTRAS)]'
ifeq ($(shell uname -s),Linux)
	$(PIP) --no-deps -r requirements-static.txt
endif
	touch $@
