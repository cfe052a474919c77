# Each target does all its set-up in .venv; a second run starts at once.
# PYTHON: the interpreter to start from, 3.11 or newer.  TORCH: what to install where torch is missing.  JOBS: processes of a test run.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Threads that wait for one another stop spinning soon: on a shared machine, spinning takes the CPU from those waited for,
# and a step of the demo was measured to take 40 times as long.
export GOMP_SPINCOUNT ?= 10000
CUDA_SOURCES := $(shell find csrc -type f)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types docs bench runs wheels release clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

demo: $(VENV)/package ## trains a small language model for a minute, then shows how its experts run
	$(BIN)/python -m fusible demo $(ARGS)

test: $(VENV)/installed ## the quick tests, which take about a minute; says what it leaves out
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not cuda and not slow" --sample 0 -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(VENV)/installed ## all tests that need no GPU; those that do: .venv/bin/python -m pytest -m cuda
	$(BIN)/python tests/emulation/build.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/installed ## style, format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)

types: $(VENV)/installed ## types, strictly
	$(BIN)/mypy

docs: $(VENV)/docs ## the documentation as a site in build/site; fails on broken links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

bench: $(VENV)/installed ## times the experts against what people write by hand
	$(BIN)/python -m fusible bench $(ARGS)

MODELS := qwen3 gpt-oss-20b mixtral deepseek-v3-ep8
runs: $(VENV)/installed ## trains and serves slices of four models on the GPUs here, and draws two plots of docs/plots
	@mkdir -p build
	$(BIN)/python -m fusible bench train --preset $(MODELS) --profile --out build/train --plot docs/plots/runs.svg $(ARGS)
	$(BIN)/python -m fusible bench generate --preset $(MODELS) --out build/generate --plot docs/plots/serving.svg

wheels: $(VENV)/tools ## a wheel with CUDA kernels for each Python from 3.11 to 3.14 that is here, in dist/; needs nvcc, but no GPU
	.ci/wheels

release: $(VENV)/release ## the wheels, the sdist and a folder for Hugging Face's Hub, in dist/; publishes nothing
	.ci/release

clean: ## takes away .venv and everything that was built
	rm -rf $(VENV) build dist src/fusible.egg-info

# installs what a list in pyproject.toml names, the package itself not being needed for it
install_listed = $(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); print(*$(1), sep="\n")' > $@.txt && $(PIP) install -q -r $@.txt

# the environment, with no more in it than csrc is built with
$(VENV)/tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("fusible needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install -q pip; }
	$(call install_listed,p["build-system"]["requires"])
	@touch $@

# with what checks a release
$(VENV)/release: $(VENV)/tools
	$(call install_listed,p["tool"]["fusible"]["release"])
	@touch $@

# with what builds the documentation, which reads the sources and imports nothing
$(VENV)/docs: $(VENV)/tools
	$(call install_listed,p["project"]["optional-dependencies"]["docs"])
	@touch $@

# with what the package needs, and numpy, of which torch warns on the screen where it is missing. Torch is a large download, whose progress pip shows.
$(VENV)/torch: $(VENV)/tools
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)'
	$(BIN)/python -c 'import numpy' 2>/dev/null || $(PIP) install -q numpy
	$(call install_listed,p["project"]["dependencies"])
	@touch $@

# the package itself, editable; again when what it is built from changes. What is compiled is compiled first, because pip hides the
# progress. Built with the pybind11 of this environment: with that of a passing one, bindings.cpp would be compiled again at the next build.
$(VENV)/package: $(VENV)/torch setup.py $(CUDA_SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

# and all that its tests and checks import. A Megatron-Core whose experts are built from ops is of Python 3.12 and newer, and runs on 3.11:
# there it lies beside the packages, and tests put it before the older one that is installed.
OF_PYTHON_3_12 := --no-deps --only-binary :all: --python-version 3.12 --ignore-requires-python --upgrade --target $(VENV)/megatron
$(VENV)/dependencies: $(VENV)/torch pyproject.toml
	$(call install_listed,p["project"]["optional-dependencies"]["dev"])
	$(call install_listed,p["tool"]["fusible"]["dev-alone"]) --no-deps
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 12) or sys.platform != "linux")' || exit 0; \
	$(call install_listed,p["tool"]["fusible"]["dev-of-newer-python"]) $(OF_PYTHON_3_12)
	@touch $@

$(VENV)/installed: $(VENV)/package $(VENV)/dependencies
	@touch $@
