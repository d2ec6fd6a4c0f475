# Everything needs only Python 3.11 or newer: `make demo` and `make test` build .venv on first use.

PYTHON ?= python3
GPU_PYTHON ?= python
VENV ?= .venv
DEMO ?= .demo
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

.PHONY: demo serve-demo test lint types unit-test browser-test format gpu-test bench clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo      generate text from a small random model (CPU)"
	@echo "make test      lint, format check, types and every CPU test"
	@echo "make lint | types | unit-test | format    one part of it"
	@echo "make browser-test    the page in headless Chromium; renews docs/page.png"
	@echo "make serve-demo      serve the demo model at http://127.0.0.1:8000"
	@echo "make gpu-test  the op tests on this GPU and the tests marked gpu, with the current interpreter ($(GPU_PYTHON))"
	@echo "make bench     every benchmark, with the current interpreter ($(GPU_PYTHON))"
	@echo "make clean     remove .venv, the demo model and caches"

# ---- environment: made once, made again when pyproject.toml or constraints.txt change ----

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else f"dsv4 needs Python 3.11 or newer, found {sys.version.split()[0]}; choose one with make PYTHON=...")'
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing dsv4 and its dependencies into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing dsv4 with its development tools into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable '.[dev,serve]'
	@touch $(RUNTIME) $@

# ---- what people run ----

$(DEMO)/tiny/config.json: | $(RUNTIME)
	@echo "==> writing a small random model to $(DEMO)/tiny"
	@mkdir -p $(DEMO)
	@$(BIN)/dsv4 synth $(DEMO)/tiny --preset tiny

demo: $(RUNTIME) $(DEMO)/tiny/config.json
	@echo "==> generating 32 tokens (the weights are random, so is the text)"
	@$(BIN)/dsv4 generate --model $(DEMO)/tiny "The capital of France is" --max-tokens 32

serve-demo: $(DEV) $(DEMO)/tiny/config.json
	@$(BIN)/dsv4 serve --model $(DEMO)/tiny

test: lint types unit-test

lint: $(DEV)
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(DEV)
	@echo "==> mypy"
	@$(BIN)/mypy dsv4

unit-test: $(DEV)
	@echo "==> pytest (CPU)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal

browser-test: $(DEV)
	@echo "==> pytest (the page in Chromium)"
	@DSV4_SCREENSHOT=1 $(BIN)/python -m pytest -q -m browser tests/serve

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# ---- on a GPU machine: no virtual environment, no installation ----

gpu-test:
	$(GPU_PYTHON) -m pytest -q tests/ops tests/testing
	$(GPU_PYTHON) -m pytest -q -m gpu

bench:
	@set -e; for file in benchmarks/bench_*.py; do echo "==> $$file"; PYTHONPATH=. $(GPU_PYTHON) "$$file"; done

clean:
	rm -rf $(VENV) $(DEMO) build dist dsv4.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dsv4 tests -name __pycache__ -type d -prune -exec rm -rf {} +
