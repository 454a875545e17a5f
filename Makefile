# The list of things one can do here. Needs python3 (>= 3.11), make and PyPI; nothing else.
#
#   make demo           the tutorial, a pipelined classifier and a GPT on 8 CPU devices
#   make test           the tests, of each family of programs the first (50 random programs, too)
#   make test-programs  all families of programs: optimizers, dataflow, control flow, meshes, ...
#   make test-all       all tests, the slow ones too
#   make check          format, lint, types, import order
#   make test-matrix    the tests on JAX 0.10.2 / 0.11 / newest, as far as the Pythons are there
#   make test-fallback  the core tests with every private JAX name switched off
#   make fuzz N=500     N random programs against plain jax.jit, from seed START
#   make bench          the benchmarks
#   make docs           the documentation, in docs/_build

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
N ?= 500
START ?= 0
SCHEDULE ?= 1f1b
ARGS ?=

PIP_FLAGS = --quiet --disable-pip-version-check
PY = $(VENV)/bin/python
STAMP = $(VENV)/.installed-dev
DOCS_STAMP = $(VENV)/.installed-docs

.PHONY: demo test test-programs test-all check format test-matrix test-fallback fuzz bench docs clean
.DEFAULT_GOAL := test

# A stamp is younger than pyproject.toml exactly when the packages it names are installed.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "MultiMesh needs Python >= 3.11")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)"
	@$(PY) -m pip install $(PIP_FLAGS) --editable '.[dev]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@$(PY) -m pip install $(PIP_FLAGS) --editable '.[docs]'
	@touch $@

demo: $(STAMP)
	$(PY) examples/tutorial_mpmd.py
	$(PY) examples/train_digits.py --schedule $(SCHEDULE) --check
	$(PY) examples/train_gpt.py --schedule $(SCHEDULE)

test: $(STAMP)
	$(PY) -m pytest -n $(JOBS) -m "not slow and not family" $(ARGS)

test-programs: $(STAMP)
	$(PY) -m pytest -n $(JOBS) -m "not slow and family" tests/programs $(ARGS)

test-all: $(STAMP)
	$(PY) -m pytest -n $(JOBS) $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# `python3.X` is taken from the PATH, else from pyenv; a Python that is not there is named and left out.
test-matrix:
	@JOBS=$(JOBS) tests/matrix.sh $(ARGS)

test-fallback: $(STAMP)
	MULTIMESH_NO_PRIVATE_JAX=1 $(PY) -m pytest -n $(JOBS) -m "core and not slow" $(ARGS)

fuzz: $(STAMP)
	$(PY) -m tests.programs.fuzz --num-programs $(N) --start $(START) $(ARGS)

bench: $(STAMP)
	$(PY) benchmarks/dispatch.py
	$(PY) benchmarks/call.py
	$(PY) benchmarks/compute.py
	$(PY) benchmarks/partition.py
	$(PY) benchmarks/schedules.py
	$(PY) benchmarks/planning.py

docs: $(DOCS_STAMP)
	$(PY) -m sphinx -W -q docs docs/_build

clean:
	rm -rf $(VENV) .venvs docs/_build build dist
