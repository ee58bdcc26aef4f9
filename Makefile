# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 2
ARGS   ?=
# What `make wheels` gets, for the Python of the machine that they are taken to; PyTorch and Transformers it has.
WHEELS     ?= ml_dtypes onnx onnx-ir onnxscript safetensors pytest-xdist execnet rich
FOR_PYTHON ?= 3.12

# What `make check` runs of the tests; together with lint and types under a minute.
FAST_TESTS ?= -m "not slow" tests/ir tests/gradient tests/optimize tests/plan tests/execute tests/test_imports.py tests/test_structure.py tests/test_operators.py

BIN     = $(VENV)/bin
DEMO    = $(VENV)/.demo
READY   = $(VENV)/.installed
NODE    = examples/anywhere/node_modules
OFFLINE = HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST  = $(OFFLINE) $(BIN)/python -m pytest

.PHONY: help demo test lint check bench bench-all gpu wheels golden operators errors tour coverage exported fuzz versions matrix javascript docs clean

help:
	@echo "make demo    fine-tune a real transformer, eager and ORTModule side by side"
	@echo "make test    everything: lint, types, floors, all tests"
	@echo "make check   lint, types, floors and the fast tests, under a minute"
	@echo "make bench   benchmarks; ARGS=\"gpt2_lm --layers 2\" chooses them"
	@echo "make bench-all   all of docs/benchmarks.md, measured and written again: an hour on an idle machine"
	@echo "make gpu     tests and benchmarks that want a CUDA device, in under nine minutes, with what is installed"
	@echo "make wheels  what make gpu needs on a machine that reaches no package index, to be taken along"
	@echo "make golden  write the golden graphs again"
	@echo "make operators  write docs/operators.md again"
	@echo "make errors     write docs/errors.md again, from programs that raise them"
	@echo "make tour       draw the pictures of docs/tour.md again, with Graphviz"
	@echo "make coverage   train a step of each architecture of Transformers and of what else is installed; ARGS=\"--families timm\" chooses"
	@echo "make exported   train what exporters write; ARGS=\"--exporters dynamo --opsets 21\" chooses"
	@echo "make fuzz    train random .onnx files; ARGS=\"--count 500\" says how many, \"--seed 7\" which"
	@echo "make fuzz N=1000  random modules as well, so many of each kind; ARGS=\"--kinds tensors\" chooses"
	@echo "make versions   the tests of artifacts with the oldest and the newest onnx, onnxruntime, numpy, ...; ARGS=oldest"
	@echo "make matrix  install the wheel with each Python, PyTorch and extra, and use it; ARGS=\"oldest newest\" for two"
	@echo "make javascript  get what trains artifacts in Node and in a browser"
	@echo "make docs    build the documentation"

# What the demo needs is soon there; tests, lint and the site need more.
$(DEMO): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[demo]"
	@touch $(DEMO)

$(READY): $(DEMO)
	$(PIP) -e ".[dev,docs]"
	@touch $(READY)

# What trains artifacts outside of Python: npm packages, and a browser where this may be installed. Tests that lack
# them are skipped and say so.
$(NODE)/.installed: examples/anywhere/package.json
	@if command -v npm >/dev/null; then \
	  cd examples/anywhere && npm install --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error \
	    || echo "npm cannot install the packages: tests in JavaScript are skipped"; \
	else echo "npm is not there: tests in JavaScript are skipped"; fi
	@if ! command -v chromium-headless-shell chromium >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; \
	then (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y chromium-headless-shell) >/dev/null 2>&1 \
	    || echo "apt-get cannot install Chromium: tests in a browser are skipped"; fi
	@mkdir -p $(NODE) && touch $@

javascript: $(NODE)/.installed

demo: $(DEMO)
	$(OFFLINE) $(BIN)/python examples/finetune_minilm.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint
	$(PYTEST) -n $(JOBS) $(FAST_TESTS)

# tests/test_site.py builds the site, as make docs does.
test: lint javascript
	$(PYTEST) -n $(JOBS)

bench: $(READY)
	@args='$(ARGS)'; $(OFFLINE) $(BIN)/python -m benchmarks.run $${args:-bert_classify}

bench-all: $(READY)
	$(OFFLINE) $(BIN)/python -m benchmarks.all $(ARGS)

# On a machine that has a device and perhaps no index: no environment is made.
gpu:
	@if ls wheels/*.whl >/dev/null 2>&1; then \
	  $(PYTHON) -m pip install --quiet --no-index --no-deps --upgrade --target out/site wheels/*.whl; fi
	$(OFFLINE) PYTHONPATH=src:out/site $(PYTHON) -m benchmarks.gpu $(ARGS)

wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(FOR_PYTHON) --implementation cp \
	  $(foreach release,2014 _2_17 _2_27 _2_28,--platform manylinux$(release)_x86_64) --dest wheels $(WHEELS)

golden: $(READY)
	$(PYTEST) tests/golden --regenerate-golden

operators: $(READY)
	$(BIN)/python -m onnxtrain.cli ops --markdown > docs/operators.md

errors: $(READY)
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/error_examples.py

tour: $(READY)
	$(OFFLINE) PYTHONPATH=tests $(BIN)/python tests/tour_pictures.py > /dev/null

coverage: $(READY)
	$(PIP) "$(TORCH)" -e ".[walks]"
	$(OFFLINE) $(BIN)/python tests/coverage/architectures.py --jobs $(JOBS) $(ARGS)

exported: $(READY)
	$(PIP) "$(TORCH)" -e ".[walks]"
	$(OFFLINE) $(BIN)/python tests/coverage/exported.py --jobs $(JOBS) --page $(ARGS)

fuzz: $(READY)
	cd tests && $(abspath $(BIN))/python -m fuzz.run --jobs $(JOBS) $(if $(N),--kinds all --count $(N)) $(ARGS)

versions:
	@args='$(ARGS)'; $(PYTHON) tests/versions.py --torch "$(TORCH)" $${args:-oldest newest}

matrix:
	@args='$(ARGS)'; $(PYTHON) tests/installed/matrix.py $${args:-all}

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(NODE) .pytest_cache .ruff_cache .import_linter_cache build dist site out
