# `make demo` and `make test` do everything on a machine with Python, pip and a C++ compiler.

PYTHON  ?= python3
VENV    ?= .venv
# Installed before the package, so that a CPU build that the machine offers is taken.
TORCH   ?= torch==2.13.0
# Test processes; the suite is sized for two cores.
WORKERS ?= 2

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LAB    := $(VENV)/.installed-notebooks
DOCS   := $(VENV)/.installed-docs
PYTEST := $(BIN)/python -m pytest
# Each process begins with whole files, whose tests share kernels, and takes some of another's in
# the end: tests take from a millisecond to half a minute.
PARALLEL := $(PYTEST) -n $(WORKERS) --dist worksteal

HAS_TORCH := $(BIN)/python -c "import sys; from importlib.util import find_spec; sys.exit(not find_spec('torch'))"
HAS_NVCC  := $(BIN)/python -c "from crossfuse.runtime.nvcc import find_nvcc; find_nvcc()" 2>/dev/null

.DEFAULT_GOAL := help
.PHONY: help demo test test-null test-cpu test-gpu nightly docs notebooks linkcheck lint install clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(STAMP) ## Fuse a small model and check the kernel, with or without a GPU.
	@$(BIN)/crossfuse demo

test: lint ## Lint, type-check and run every test that this machine can run.
	$(PARALLEL)

test-null: $(STAMP) ## Run the tests that compile nothing.
	$(PARALLEL) -m null

test-cpu: $(STAMP) ## Run the tests that compile and check on the CPU.
	$(PARALLEL) -m cpu

# One process: the tests share one device, and some of them measure.
test-gpu: $(STAMP) ## Run the tests that need a Hopper GPU.
	$(PYTEST) -m gpu

nightly: lint ## Run every test with ten times the generated examples.
	$(PARALLEL) --hypothesis-profile=nightly

# Tutorials are executed at the first build and after changes; their outputs are cached.
docs: $(DOCS) ## Build the documentation as HTML, without warnings, tutorials executed.
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# After changes of a tutorial, of records that it reads, and of what the package prints there. The
# same sources make the same files.
notebooks: $(LAB) ## Execute the tutorials into notebooks; draw the plot of the README.
	$(BIN)/python scripts/make_notebooks.py
	$(BIN)/python scripts/plot_speed.py

# Not among the tests: a site that is down, or no network, is no fault of a change.
linkcheck: $(DOCS) ## Ask other sites whether links of the documentation lead anywhere; needs a network.
	$(BIN)/sphinx-build -q -D nb_execution_mode=off -D suppress_warnings=myst-nb.lexer \
		-b linkcheck docs docs/_build/linkcheck
	@echo "docs/_build/linkcheck/output.txt"

lint: $(STAMP) ## Check style, formatting and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(STAMP) $(LAB) ## Create the virtual environment and install the package editable.

$(STAMP): pyproject.toml setup.py
	@echo "Installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(HAS_TORCH) || $(BIN)/python -m pip install --quiet "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --editable ".[torch,dev]"
	@$(HAS_NVCC) || $(BIN)/python -m pip install --quiet --editable ".[nvcc]"
	@touch $@

$(LAB): $(STAMP)
	@$(BIN)/python -m pip install --quiet --editable ".[notebooks]"
	@touch $@

$(DOCS): $(STAMP)
	@$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@touch $@

clean: ## Remove everything that make and the tools made, the virtual environment too.
	rm -rf $(VENV) build dist docs/_build docs/generated .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
