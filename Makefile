# Every target makes its own environment first: .venv, exactly the versions of constraints.txt.
#   make run                          the main job
#   make test PYTHON=python3.12       with another Python (3.11 or newer)
# The small CPU build of torch, where PyPI's would bring CUDA with it (most Linux machines):
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make run

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
READY := .venv/.ready-$(VERSION)

.DEFAULT_GOAL := help
.PHONY: help run test test-all check clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

run: $(READY)  ## The main job: train Local, FedAvg and PGFed on digits and compare them (ARGS="pgfed --rounds 50")
	$(BIN)/perfed run $(ARGS)

test: check  ## Lint, types, and the tests that are quick
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: check  ## The same, with the slow tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" $(ARGS)

check: $(READY)  ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

clean:  ## Remove the environment and all caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and by its exact version, so that nothing after it chooses another build; the build backend is
# installed like everything else, so that building perfed fetches nothing.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "perfed needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@test -e $@ || { echo "making .venv with Python $(VERSION): a minute or more"; $(PYTHON) -m venv --clear .venv; }
	@$(PIP) --upgrade pip
	@$(PIP) torch==2.13.0
	@$(PIP) hatchling editables --group dev
	@$(PIP) --no-build-isolation -e .
	@touch $@
