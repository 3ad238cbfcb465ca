# `make train` and `make test` are all that a newcomer needs. Each makes the virtual environment
# when there is none, installs what it needs from PyPI once, and runs; after that, offline.

# The first Python on the PATH that is new enough and can make virtual environments.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys, venv, ensurepip, ssl; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  && echo $$p && break; done)
VENV ?= .venv
JOBS ?= 2
ARGS ?=
BIN := $(VENV)/bin

.PHONY: help train test test-fast lint format docs clean
.NOTPARALLEL:

help:
	@echo 'make train      train the LLaMA example with Nora         ARGS="--steps 100"'
	@echo 'make test       the whole test suite                      ARGS="-k row_project" JOBS=4'
	@echo 'make test-fast  the tests not marked slow'
	@echo 'make lint       ruff and pyright; make format mends what ruff can'
	@echo 'make docs       build the documentation into site/'
	@echo 'make clean      remove what was built; runs/ stays'

train: $(VENV)/.examples
	$(BIN)/python -m examples.llama.train $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow' $(ARGS)

lint: $(VENV)/.test $(VENV)/.docs $(VENV)/.lint
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: $(VENV)/.lint
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache .hypothesis

$(BIN)/pip:
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 or newer with venv on the PATH;' \
	  'name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml that is installed.
$(VENV)/.%: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --editable '.[$*]'
	@touch $@
