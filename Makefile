# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 2
ARGS   ?=

# What `make check` runs of the tests; together with lint and types under a minute.
FAST_TESTS ?= -m "not slow" tests/ir tests/gradient tests/optimize tests/plan tests/execute tests/test_imports.py tests/test_operators.py

BIN     = $(VENV)/bin
READY   = $(VENV)/.installed
OFFLINE = HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST  = $(OFFLINE) $(BIN)/python -m pytest

.PHONY: help demo test check bench golden operators coverage docs clean

help:
	@echo "make demo    fine-tune a real transformer, eager and ORTModule side by side"
	@echo "make test    everything: make check, then all tests"
	@echo "make check   lint, types, floors and the fast tests, under a minute"
	@echo "make bench   benchmarks; ARGS=\"gpt2_lm --layers 2\" chooses them"
	@echo "make golden  write the golden graphs again"
	@echo "make operators  write docs/operators.md again"
	@echo "make coverage   train a step of each Transformers architecture; ARGS=\"--only LlamaForCausalLM\" chooses"
	@echo "make docs    build the documentation"

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[dev,demo]"
	@touch $(READY)

demo: $(READY)
	$(OFFLINE) $(BIN)/python examples/finetune_minilm.py $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(PYTEST) -n $(JOBS) $(FAST_TESTS)

test: check
	$(PYTEST) -n $(JOBS)

bench: $(READY)
	@args='$(ARGS)'; $(OFFLINE) $(BIN)/python -m benchmarks.run $${args:-bert_classify}

golden: $(READY)
	$(PYTEST) tests/golden --regenerate-golden

operators: $(READY)
	$(BIN)/python -m onnxtrain.cli ops --markdown > docs/operators.md

coverage: $(READY)
	$(OFFLINE) $(BIN)/python tests/coverage/architectures.py --jobs $(JOBS) $(ARGS)

docs: $(READY)
	$(PIP) -e ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache build dist site out
