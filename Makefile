# Commands for development. Each target first creates .venv. Requires Python 3.10 to 3.14, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Compiled modules are kept: without them, each process that imports torch takes 3 seconds longer to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-cluster test-full check collect site native wheel bench horovod clean

# Tests run more threads than there are cores. Waiting OpenMP threads must then sleep, not spin: torch is three times as fast.
test: export OMP_WAIT_POLICY = passive

demo: $(VENV)/ready  ## train ResNet-50 on handwritten digits with 2 processes
	$(BIN)/worldsize train digits --procs 2

test: $(VENV)/ready  ## run the tests of the gate (`.ci/run`)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not slurm and not hosts and not cluster"

test-slow:  ## run the slow tests
	.ci/full slow horovod

test-cluster:  ## run the tests that need a Kubernetes cluster
	.ci/full cluster

test-full:  ## run all tests: hours
	.ci/full

check: $(VENV)/ready  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

collect: $(VENV)/ready  ## import all tests: finds what cannot be imported, and compiles what tests import
	$(BIN)/python -m pytest --collect-only -qq

site: $(VENV)/ready  ## build the documents as a site in build/site, for reading without a network
	$(BIN)/python docs/make_site.py build/site

native: $(VENV)/ready  ## test the native decoder with sanitizers; fuzz it for FUZZ_SECONDS (60)
	$(MAKE) -C native check PYTHON=$(abspath $(BIN)/python)

wheel: $(VENV)/ready  ## build a wheel in dist/ that includes libjpeg-turbo; needs patchelf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check auditwheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/worldsize-*.whl

bench: $(VENV)/ready  ## repeat the measurements of benchmarks/README.md; 45 minutes on an idle machine
	$(BIN)/python benchmarks/measure.py all

horovod: $(VENV)/ready  ## build Horovod for .venv's torch and install it: 2 minutes, later seconds (cached)
	scripts/build_horovod.sh $(BIN)/python

$(VENV)/ready: pyproject.toml constraints.txt setup.py $(wildcard native/src/*)
	$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 14); sys.exit(None if ok else "worldsize requires Python 3.10 to 3.14; pass another one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	# Without --no-compile, pip compiles every module of torch and others, of which few are imported: half a minute.
	# The first process that imports a module compiles it.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable ".[dev,docs,k8s,report,tensorboard,wandb]"
	touch $@

clean:
	rm -rf $(VENV) build native/build src/worldsize/data/images/_native.* src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
