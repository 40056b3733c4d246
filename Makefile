# Everything from a fresh machine with Python 3.11+ and pip: `make demo`, `make test`, `make serve`.
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

# An environment of its own for the serving engine that long tests start.
VLLM := .venv-vllm
# And one for the S3 server that system tests start.
S3 := .venv-s3

# SLICE and MINUTES: a part of the long tests, as in SLICE=3/8, and after how many minutes no more of them are started.
SLICE ?=
MINUTES ?=
FAST := -m "not system and not wide and not long" --ignore tests/attacks -n $(WORKERS) --dist worksteal

.PHONY: demo serve test coverage test-system test-long serving-engine s3-server lint docs release-check clean
.DELETE_ON_ERROR:

demo: $(VENV)/.report
	$(BIN)/imprint demo

# The service with a demo of its own, until Ctrl-C.
serve: $(VENV)/.serve
	$(BIN)/imprint serve --demo

# What pip packages suffice for, in 12 minutes of one core.
test: lint
	$(BIN)/pytest $(FAST)

coverage: lint
	$(BIN)/pytest $(FAST) --cov --cov-report=term

# Processes that are killed, signals, mounts, servers and browsers; and claims on more architectures, plans and pages.
test-system: $(VENV)/.test $(S3)/.ready
	$(BIN)/pytest -m "(system or wide) and not long" --ignore tests/attacks -n $(WORKERS) --dist worksteal tests

# Corpora, load and attacks.
test-long: $(VENV)/.test
	$(BIN)/pytest -m long $(if $(SLICE),--slice $(SLICE)) $(if $(MINUTES),--minutes $(MINUTES)) tests

# vLLM for CPUs, whose requirements clash with ours; TORCH_INDEX matters here too. With it, test-long starts servers on 127.0.0.1.
serving-engine: $(VLLM)/.ready

# An S3 server in memory, whose requirements clash with ours. With it, test-system starts one on 127.0.0.1.
s3-server: $(S3)/.ready

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# builds sdist and wheel, installs the wheel into an environment of its own, and tries it there
release-check: $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python tests/release.py dist -- --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

clean:
	rm -rf $(VENV) $(VLLM) $(S3) site dist imprint-demo .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: with the pinned build in place nothing later looks for another one
$(VENV)/.torch: $(BIN)/python constraints.txt
	$(PIP) torch
	touch $@

$(VENV)/.report: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[report]"
	touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	$(PIP) --editable ".[serve]"
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml requirements/test.txt requirements/kronfluence.txt
	$(PIP) --editable ".[all]" --requirement requirements/test.txt
	$(PIP) --no-deps --requirement requirements/kronfluence.txt
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml requirements/docs.txt
	$(PIP) --editable . --requirement requirements/docs.txt
	touch $@

$(VENV)/.release: $(BIN)/python constraints.txt requirements/release.txt
	$(PIP) --requirement requirements/release.txt
	touch $@

# without dependencies: those that text on a CPU needs are all listed, and vLLM's own list has many more
$(VLLM)/.ready: requirements/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $< torch \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $<
	$(VLLM)/bin/python -c "import vllm.entrypoints.openai.api_server"
	touch $@

$(S3)/.ready: requirements/s3.txt
	$(PYTHON) -m venv $(S3)
	$(S3)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $<
	$(S3)/bin/python -c "import moto.server"
	touch $@
