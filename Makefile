# Everything needs only Python 3.11 or newer: `make demo` and `make test` build .venv on first use.

PYTHON ?= python3
GPU_PYTHON ?= python
VENV ?= .venv
CLIENTS ?= .venv-clients
RAY ?= .venv-ray
OPENAI_2 := tests/clients/test_instructor.py tests/clients/test_litellm.py
TRL := tests/clients/test_trl.py
DEMO_PROMPT ?= SCENE I. A street in Verona.
DEMO_SEED ?= 7
BASE ?= main
QUICK := tests/formats tests/cache tests/text tests/engine/schedule/test_scheduler.py tests/engine/step/test_step.py \
  tests/config tests/test_request.py tests/test_imports.py tests/test_public_names.py tests/test_style.py \
  tests/model/test_vectors.py::test_single_blocks
# one more than cores, since some tests mostly wait; not more than 8, since each holds a torch of its own
WORKERS := $(shell $(PYTHON) -c "import os; print(min(8, os.cpu_count() + 1))")
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

.PHONY: demo serve-demo test quick affected lint types unit-test client-test ray-test browser-test slow-test try-triton format gpu-test bench clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo      stream text from the trained miniature that ships with dsv4 (CPU)"
	@echo "make test      lint, format check, types and every CPU test"
	@echo "make quick     a first look, below 40 seconds: formats, cache, scheduler, text, config, imports, single blocks"
	@echo "make affected  the tests that what differs from BASE ($(BASE)) can turn red, by the imports"
	@echo "make lint | types | unit-test | format    one part of it"
	@echo "make client-test     openai, anthropic, langchain, trl, Claude Code, Codex, ... against a live server (needs npm)"
	@echo "make ray-test        replicas on a local Ray, on the CPU"
	@echo "make browser-test    the page in headless Chromium; renews docs/page.png"
	@echo "make slow-test       the tests that take long: a storm on a server"
	@echo "make try-triton      the kernels with the newest Triton: self-test in the interpreter, compile check"
	@echo "make serve-demo      serve that miniature at http://127.0.0.1:8000"
	@echo "make gpu-test  the op tests on this GPU and the tests marked gpu, with the current interpreter ($(GPU_PYTHON))"
	@echo "make bench     every benchmark that needs a GPU, with the current interpreter ($(GPU_PYTHON))"
	@echo "make clean     remove .venv and caches"

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

demo: $(RUNTIME)
	@echo "==> flash-mini, a DeepSeek-V4 of 13 million parameters that ships with dsv4, continues: $(DEMO_PROMPT)"
	@$(BIN)/dsv4 generate "$(DEMO_PROMPT)" --max-tokens 96 --temperature 0.7 --top-p 0.9 --seed $(DEMO_SEED) --drafts auto --stats

serve-demo: $(DEV)
	@$(BIN)/dsv4 serve

test: lint types unit-test

lint: $(DEV)
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(DEV)
	@echo "==> mypy"
	@$(BIN)/mypy

unit-test: $(DEV)
	@echo "==> pytest (CPU)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder

# three environments: clients disagree about the version of openai, and one needs transformers
client-test: $(CLIENTS)/openai-2/.installed $(CLIENTS)/openai-3/.installed $(CLIENTS)/trl/.installed $(CLIENTS)/npm/.installed
	@echo "==> pytest (clients with openai 2 against a live server)"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(CLIENTS)/openai-2/bin/python -m pytest -q -m client tests/clients/test_sdks.py $(OPENAI_2)
	@echo "==> pytest (clients with openai 3 against a live server)"
	@OMP_NUM_THREADS=1 PYTHONPATH=. CLIENT_PROGRAMS=$(CLIENTS)/npm/node_modules/.bin \
	  $(CLIENTS)/openai-3/bin/python -m pytest -q -m client tests/clients $(OPENAI_2:%=--ignore %) --ignore $(TRL)
	@echo "==> pytest (TRL against a live server)"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(CLIENTS)/trl/bin/python -m pytest -q -m client $(TRL)

$(CLIENTS)/%/.installed: pyproject.toml tests/clients/requirements/%.txt
	@echo "==> installing clients into $(CLIENTS)/$* (a gigabyte or more, minutes the first time)"
	@$(PYTHON) -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install -qq --disable-pip-version-check --editable '.[serve]' \
	  -r tests/clients/requirements/$*.txt
	@touch $@

$(CLIENTS)/npm/.installed: tests/clients/requirements/package.json
	@command -v npm > /dev/null || { echo "make client-test runs Claude Code and Codex: install node and npm"; exit 1; }
	@echo "==> installing Claude Code and Codex into $(CLIENTS)/npm"
	@mkdir -p $(CLIENTS)/npm && cp $< $(CLIENTS)/npm/
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(CLIENTS)/npm
	@node $(CLIENTS)/npm/node_modules/@anthropic-ai/claude-code/install.cjs  # puts the program in its place
	@touch $@

ray-test: $(RAY)/.installed
	@echo "==> pytest (replicas on a local Ray)"
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(RAY)/bin/python -m pytest -q -m ray tests/replicas

$(RAY)/.installed: pyproject.toml constraints.txt
	@echo "==> installing dsv4 with Ray into $(RAY) (a few minutes the first time)"
	@$(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[ray]' httpx hypothesis pytest
	@touch $@

quick: $(DEV)
	@echo "==> pytest (quick)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 -m 'not gpu and not slow and not thorough' \
	  --hypothesis-profile=quick $(QUICK)

affected: $(DEV)
	@echo "==> pytest (what the difference from $(BASE) can turn red)"
	@files=$$($(BIN)/python tools/affected.py --base $(BASE)) || exit 1; \
	  if [ -z "$$files" ]; then echo "no test depends on what changed"; else \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder $$files; fi

browser-test: $(DEV)
	@echo "==> pytest (the page in Chromium)"
	@DSV4_SCREENSHOT=1 $(BIN)/python -m pytest -q -m browser tests/http tests/cli

slow-test: $(DEV)
	@echo "==> pytest (slow)"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

try-triton: $(DEV)
	@echo "==> the newest Triton beside the installed torch"
	@$(BIN)/python tools/try_triton.py

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python tools/wrap_docs.py

# ---- on a GPU machine: no virtual environment, no installation ----

gpu-test:
	$(GPU_PYTHON) -m pytest -q tests/ops tests/testing
	$(GPU_PYTHON) -m pytest -q -m gpu

bench:
	@set -e; for name in ops model step timeline drafts prefix ranks server; do \
	  echo "==> $$name"; $(GPU_PYTHON) -m benchmarks $$name; done

clean:
	rm -rf $(VENV) $(CLIENTS) $(RAY) build dist dsv4.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dsv4 tests -name __pycache__ -type d -prune -exec rm -rf {} +
