# Everything a contributor types. Each target sets up .venv first; it needs Python 3.10 to 3.13, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all check native wheel bench horovod clean

demo: $(VENV)/ready  ## train ResNet-50 on handwritten digits with 2 processes
	$(BIN)/worldsize train digits --procs 2

test: $(VENV)/ready  ## the tests, without the slow ones
	$(BIN)/python -m pytest -m "not slow and not cluster"

test-all: $(VENV)/ready  ## all tests
	$(BIN)/python -m pytest

check: $(VENV)/ready  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

native: $(VENV)/ready  ## the native decoder under sanitizers, and FUZZ_SECONDS (60) of damaged pictures
	$(MAKE) -C native check PYTHON=$(abspath $(BIN)/python)

wheel: $(VENV)/ready  ## a wheel in dist/ that brings libjpeg-turbo along; needs patchelf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check auditwheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/worldsize-*.whl

bench: $(VENV)/ready  ## measure again what benchmarks/README.md reports; takes three quarters of an hour on a quiet machine
	$(BIN)/python benchmarks/measure.py all

horovod: $(VENV)/ready  ## build Horovod for .venv's torch and install it there: two minutes, seconds the next time
	scripts/build_horovod.sh $(BIN)/python

$(VENV)/ready: pyproject.toml constraints.txt setup.py $(wildcard native/src/*)
	$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); sys.exit(None if ok else "worldsize needs Python 3.10 to 3.13: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,k8s,tensorboard,wandb]"
	touch $@

clean:
	rm -rf $(VENV) build native/build src/worldsize/data/_native.* src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
