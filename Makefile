# Everything from a fresh machine with Python 3.11+ and pip: `make demo`, `make test`.
# TORCH_INDEX: an extra package index for torch. On Linux without a GPU, https://download.pytorch.org/whl/cpu
# saves a download of several gigabytes.
PYTHON ?= python3
TORCH_INDEX ?=
# WORKERS: processes that tests run in, each with one thread.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# SLICE and MINUTES: a part of the long tests, as in SLICE=3/8, and after how many minutes no more of them are started.
SLICE ?=
MINUTES ?=
FAST := -m "not system and not long" -n $(WORKERS) --dist worksteal

.PHONY: demo test coverage test-system test-long lint docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.report
	$(BIN)/imprint demo

# What pip packages suffice for, in 12 minutes of one core.
test: lint
	$(BIN)/pytest $(FAST)

coverage: lint
	$(BIN)/pytest $(FAST) --cov --cov-report=term

# Processes that are killed, signals, mounts, servers and browsers.
test-system: $(VENV)/.test
	$(BIN)/pytest -m "system and not long" -n $(WORKERS) --dist worksteal tests

# Corpora, load and attacks.
test-long: $(VENV)/.test
	$(BIN)/pytest -m long $(if $(SLICE),--slice $(SLICE)) $(if $(MINUTES),--minutes $(MINUTES)) tests

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site imprint-demo .coverage .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: with the pinned build in place nothing later looks for another one
$(VENV)/.%: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable ".[$*]"
	touch $@
