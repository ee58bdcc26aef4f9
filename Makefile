# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 2
ARGS   ?=

BIN   := $(VENV)/bin
READY := $(VENV)/.installed
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test check bench golden docs clean

help:
	@echo "make demo    fine-tune a real transformer, eager and ORTModule side by side"
	@echo "make test    everything: make check, then all tests"
	@echo "make check   lint, types, floors and the fast tests, under a minute"
	@echo "make bench   benchmarks; ARGS=\"gpt2_lm --layers 2\" chooses them"
	@echo "make golden  write the golden graphs again"
	@echo "make docs    build the documentation"

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/python examples/finetune_minilm.py $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS)

test: check
	$(BIN)/python -m pytest -m slow -n $(JOBS)

bench: $(READY)
	$(BIN)/python -m benchmarks.run $(or $(ARGS),bert_classify)

golden: $(READY)
	$(BIN)/python -m pytest tests/golden --regenerate-golden

docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache build dist site out
