# make demo    from nothing to the main figure on a small offline model: environment, model, table and PNG
# make test    environment, demo model, tests          make lint    ruff and mypy
# make bench   TTFT by stage, against its floor, over length and ratio, over chunks and batch; peak memory
# make clean   caches and build output (keeps .venv)

PYTHON ?= python3
VENV ?= .venv
TORCH_VERSION ?= 2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install -qq --disable-pip-version-check

# OpenMP threads that spin while they wait bring a busy two-core machine to a halt.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test bench lint clean models env env-dev

help:
	@sed -n '1,4s/^# *//p' $(firstword $(MAKEFILE_LIST))

demo: env models
	$(PY) -m experiments.fig12 --preset demo

test: env-dev models
	$(PY) -m pytest

# One after the other: each wants the machine for itself. What they measured is in benchmarks/results.
bench: env models
	$(PY) -m benchmarks.ttft --repeats 5
	$(PY) -m benchmarks.floor --repeats 5
	$(PY) -m benchmarks.growth
	$(PY) -m benchmarks.shapes
	$(PY) -m benchmarks.peak

lint: env-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Fetched once to the user's cache; at once when it is there already.
models: env
	$(PY) -m kvreuse.demo

env: $(VENV)/.stamp-experiments
env-dev: $(VENV)/.stamp-dev

$(VENV)/.stamp-experiments: pyproject.toml $(VENV)/.stamp-torch
	@echo "installing kvreuse[experiments] into $(VENV)"
	@$(INSTALL) -e '.[experiments]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-torch
	@echo "installing kvreuse[experiments,notebooks,dev] into $(VENV)"
	@$(INSTALL) -e '.[experiments,notebooks,dev]'
	@touch $@ $(VENV)/.stamp-experiments

# PyTorch comes before all else: a plain dependency on it brings several GB of CUDA libraries to a machine
# that has no GPU. There we take the CPU build: from pip's own indexes if they have it, else from PyTorch's
# if it answers, else whatever the plain version is.
$(VENV)/.stamp-torch:
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@if $(PY) -c 'import torch' >/dev/null 2>&1; then \
	    :; \
	elif [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null 2>&1; then \
	    echo "NVIDIA GPU found: installing PyTorch with CUDA"; \
	    $(INSTALL) 'torch>=2.6'; \
	elif [ "$$(uname -s)" != Linux ]; then \
	    echo "installing PyTorch"; \
	    $(INSTALL) 'torch>=2.6'; \
	else \
	    echo "no NVIDIA GPU found: installing PyTorch's CPU build"; \
	    $(INSTALL) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	    || { timeout 3 $(PY) -c 'import urllib.request as u; u.urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=3)' 2>/dev/null \
	         && $(INSTALL) --extra-index-url $(TORCH_CPU_INDEX) 'torch==$(TORCH_VERSION)+cpu'; } \
	    || $(INSTALL) 'torch==$(TORCH_VERSION)' \
	    || $(INSTALL) 'torch>=2.6'; \
	fi
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
