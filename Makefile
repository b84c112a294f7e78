# `make demo` and `make test` need Python 3.11+ and make; the rest is installed into .venv.
# PYTHON=/path/to/python3.12 chooses the interpreter that .venv is made with.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# pip compiles no bytecode ahead; the first import writes it. Without it every process that a test
# starts would compile torch and transformers anew, which takes 8 s.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
TORCH_TRITON := 3.7.1
PYTHON ?=
# A worker for each processor: most tests keep one busy. PYTEST_ARGS="-n 0 -k name" runs few in one.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist worksteal

# The stamp's name holds what was installed, so an edit of either file installs again.
INSTALLED := $(VENV)/.installed-$(shell cat constraints.txt pyproject.toml | cksum | cut -d' ' -f1)

.PHONY: help venv demo test lint types layers pytest page ray soak late-gpu architectures bench triton-3.6 format lock clean

help:
	@echo "make demo     convert a small model to 4 bits and answer a prompt under a memory budget"
	@echo "make test     lint, types and tests"
	@echo "make page     the tests of the server's page, in headless Chromium"
	@echo "make ray      the tests of jobs on a Ray cluster whose machines are killed: minutes"
	@echo "make soak     a minute of honest, hostile and vanishing clients at a server"
	@echo "make late-gpu the tests of a GPU on one that is simulated and computes as late as it may"
	@echo "make architectures  compile all variants of Triton kernels for every architecture"
	@echo "make bench    the CPU and disk benches, each beside its peer or its limit"
	@echo "make triton-3.6  fetch Triton 3.6.0, with which the tests then compile all kernels too"
	@echo "make format   format and fix the sources"
	@echo "make lock     write constraints.txt with the newest versions"
	@echo "make clean    remove $(VENV), caches and build products"

venv: $(INSTALLED)

# A candidate counts only if it runs: version managers leave commands behind that do not.
$(BIN)/python:
	@python='$(PYTHON)'; \
	at_least='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	if [ -n "$$python" ]; then \
	    "$$python" -c "$$at_least" || { echo "PYTHON=$$python is not a Python 3.11+ with venv" >&2; exit 1; }; \
	else \
	    for name in python3.11 python3.12 python3.13 python3; do \
	        if "$$name" -c "$$at_least" 2>/dev/null; then python="$$name"; break; fi; \
	    done; \
	fi; \
	if [ -z "$$python" ]; then \
	    echo "qoff needs Python 3.11 or newer with its venv module (Debian: python3-venv); none of" >&2; \
	    echo "python3.11, python3.12, python3.13, python3 is one. Install one, or name it: make PYTHON=..." >&2; \
	    exit 1; \
	fi; \
	echo "creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)

# The pip that comes with Python 3.11 takes half as long again. torch comes first and alone: that request also matches a build without CUDA where pip is offered
# one. The package itself is built with the setuptools that torch brought, not with a fetched one.
$(INSTALLED): $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile 'pip>=26'
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(TORCH) -c constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check 'setuptools>=77' -c constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --no-build-isolation -e '.[dev]' -c constraints.txt
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python -m bench.demo

# Types are checked beside the tests, and what is wrong with them is said after these.
test: lint
	@$(BIN)/mypy > $(VENV)/.types 2>&1 & types=$$!; \
	echo "$(BIN)/pytest $(PYTEST_ARGS)"; $(BIN)/pytest $(PYTEST_ARGS) && tests=0 || tests=$$?; \
	wait $$types && checked=0 || checked=$$?; \
	echo "$(BIN)/mypy"; cat $(VENV)/.types; \
	exit $$((tests | checked))

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

layers: $(INSTALLED)
	$(BIN)/pytest -q tests/test_layers.py

pytest: $(INSTALLED)
	$(BIN)/pytest $(PYTEST_ARGS)

page: $(INSTALLED)
	@command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null \
	    || { echo "there is no Chromium; Debian: apt-get install chromium" >&2; exit 1; }
	$(BIN)/pytest tests/serve/test_page.py

ray: $(INSTALLED)
	QOFF_TEST_RAY=1 $(BIN)/pytest tests/ray

soak: $(INSTALLED)
	QOFF_TEST_SOAK_S=60 $(BIN)/pytest tests/bench/test_soak.py

# Both ways that a missing wait shows: copies come late, or before what they overwrite was read.
late-gpu: $(INSTALLED)
	QOFF_LATE_GPU=late $(BIN)/pytest $(PYTEST_ARGS) -m gpu --timeout 1200
	QOFF_LATE_GPU=early $(BIN)/pytest $(PYTEST_ARGS) -m gpu --timeout 1200

architectures: $(INSTALLED)
	QOFF_ALL_ARCHITECTURES=1 $(BIN)/pytest tests/kernels/test_compile.py

bench: $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[bench]' --no-build-isolation -c constraints.txt
	for name in cpu_matmul cpu_attention cpu_decode families disk_stream "offload --large --plot"; do $(BIN)/python -m bench.$$name; done

# Beside .venv, not in it: tests/kernels/test_compile.py puts the folder on a process's path.
triton-3.6: $(BIN)/python
	rm -rf .triton-3.6
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target .triton-3.6 triton==3.6.0

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The newest versions that go together, from an environment of its own; see constraints.txt.
lock: $(BIN)/python
	$(BIN)/python -m venv --clear build/lock
	build/lock/bin/python -m pip install $(TORCH)
	build/lock/bin/python -m pip install '.[bench,dev,eval,ray,serve]'
	{ grep '^#' constraints.txt; build/lock/bin/python -m pip freeze --all \
	    | grep -v -e '^pip==' -e '^qoff' \
	    | sed -e 's/+cpu$$//' -e 's/^triton==/triton>=$(TORCH_TRITON),<=/'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) .triton-3.6 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
