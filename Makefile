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

types: $(VENV)/installed ## types, strictly
	$(BIN)/mypy

bench: $(VENV)/installed ## times the experts against what people write by hand
	$(BIN)/python -m fusible bench $(ARGS)

clean:
	rm -rf $(VENV) build fusible.egg-info

# the environment, with torch in it
$(VENV)/torch:
	@$(PYTHON) -c 'import sys; sys.exit("fusible needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install -q pip; }
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)'
	@touch $@

# the package itself, editable, with what the tests need; again when what it is built from changes
$(VENV)/installed: $(VENV)/torch pyproject.toml setup.py $(CUDA_SOURCES)
	$(PIP) install -e '.[dev]'
	@touch $@
