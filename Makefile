# Each target does all its set-up in .venv; a second run starts at once.
# PYTHON: the interpreter to start from, 3.11 or newer.  TORCH: what to install where torch is missing.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# Threads that wait for one another stop spinning soon: on a shared machine, spinning takes the CPU from those waited for,
# and a step of the demo was measured to take 40 times as long.
export GOMP_SPINCOUNT ?= 10000
CUDA_SOURCES := $(shell find csrc -type f)

.PHONY: demo test lint types bench clean

demo: $(VENV)/installed ## trains a small language model for a minute, then shows how its experts run
	$(BIN)/python -m fusible demo $(ARGS)

test: $(VENV)/installed ## the tests that need no GPU; with one: make test ARGS="-m cuda"
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed ## style, format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)

types: $(VENV)/installed ## types, strictly
	$(BIN)/mypy

bench: $(VENV)/installed ## times the experts against what people write by hand
	$(BIN)/python -m fusible bench $(ARGS)

clean:
	rm -rf $(VENV) build fusible.egg-info

# installs what a list in pyproject.toml names, the package itself not being needed for it
install_listed = $(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); print(*$(1), sep="\n")' > $@.txt && $(PIP) install -r $@.txt

# the environment, with no more in it than csrc is built with
$(VENV)/tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("fusible needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install -q pip; }
	$(call install_listed,p["build-system"]["requires"])
	@touch $@

# with torch and all else that the package and its tests import
$(VENV)/dependencies: $(VENV)/tools pyproject.toml
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)'
	$(call install_listed,p["project"]["dependencies"] + p["project"]["optional-dependencies"]["dev"])
	@touch $@

# the package itself, editable; again when what it is built from changes. Built with the pybind11 of this environment: with that of a
# passing one, bindings.cpp would be compiled again at the next build.
$(VENV)/installed: $(VENV)/dependencies setup.py $(CUDA_SOURCES)
	$(PIP) install --no-build-isolation -e '.[dev]'
	@touch $@
