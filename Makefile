# Two commands do everything, set-up included: `make train` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CHECK_PYTHON := import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or newer: PYTHON=python3.12 make")
MAKE_VENV := test -x $(BIN)/python || { $(PYTHON) -c '$(CHECK_PYTHON)' && $(PYTHON) -m venv $(VENV); }
PIP    := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

.PHONY: setup setup-dev train count test test-slow test-gpu test-multi-gpu lint ruff mypy pytest format wheel clean

# What training needs. --no-compile: byte-compiling the dependencies takes longer than unpacking them. pip first: the
# one that comes with Python 3.11 takes twice as long for the rest.
setup: $(VENV)/.setup-done
$(VENV)/.setup-done: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (about a minute)…"
	@$(MAKE_VENV)
	@$(PIP) pip
	@$(PIP) -e ".[report]"
	@touch $@

# And what the tests need besides: Triton for the kernels, transformers and lm-eval, the checkers. While pip installs
# that, which takes one core, another byte-compiles torch.
setup-dev: $(VENV)/.setup-dev-done
$(VENV)/.setup-dev-done: pyproject.toml constraints.txt
	@echo "Setting up $(VENV) for the tests (about a minute)…"
	@$(MAKE_VENV)
	@$(PIP) pip
	@$(PIP) torch
	@$(BIN)/python -m compileall -qq $(VENV)/lib/python3*/site-packages/torch & \
		$(PIP) -e ".[kernels,data,hub,eval,report,dev]" && wait
	@touch $(VENV)/.setup-done $@

train: setup
	$(BIN)/tercet train --preset tiny

lint: ruff mypy

ruff: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: setup-dev
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy runs beside the tests, which leave a core idle at the start and now and then.
test: ruff
	@$(MAKE) --no-print-directory -j 2 mypy pytest

# Two workers, one thread each: two cores are what CI has. Files stay whole, for what their tests share, and long ones
# start first (tests/conftest.py). Bytecode is always written: many tests start processes that import torch.
pytest test-slow $(VENV)/.bytecode-done: export PYTHONDONTWRITEBYTECODE :=
pytest: $(VENV)/.bytecode-done
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# One process imports all that the tests import; otherwise each worker would compile the same thousands of modules.
$(VENV)/.bytecode-done: $(VENV)/.setup-dev-done
	@$(BIN)/python -m pytest --collect-only >/dev/null || true
	@touch $@

test-slow: setup-dev
	$(BIN)/python -m pytest -m slow

# On a machine with a CUDA device; uses whatever Python holds torch there: make test-gpu GPU_PYTHON=python3
# Workers compile kernels in parallel. Tests that need the GPU to themselves run last, one by one.
# Without pytest-xdist: GPU_WORKERS=0.
GPU_PYTHON  ?= $(BIN)/python
GPU_WORKERS ?= 8
GPU_PARALLEL := $(if $(filter-out 0,$(GPU_WORKERS)),-n $(GPU_WORKERS) --dist worksteal)
GPU_TEST     := PYTHONPATH=src:$$PYTHONPATH TORCHINDUCTOR_COMPILE_THREADS=2 $(GPU_PYTHON) -m pytest
test-gpu:
	$(GPU_TEST) $(GPU_PARALLEL) -m "gpu and not serial and not multi_gpu" tests
	$(GPU_TEST) -m "gpu and serial and not multi_gpu" tests

# Several ranks over NCCL: every strategy against one process, saves, failures, overlap. Any number of GPUs: ranks share
# them if there are too few, which needs NCCL 2.30 (the tests say how to install it).
# Most of these tests run over gloo, on CPUs, in `make test-slow`.
# The first launch runs alone: it compiles kernels that the others would all compile at once.
FIRST_LAUNCH := "tests/parallel/test_multi_gpu.py::test_ranks_train_like_one_process[nccl-ddp]"
test-multi-gpu:
	$(GPU_TEST) -m multi_gpu $(FIRST_LAUNCH)
	$(GPU_TEST) $(GPU_PARALLEL) -m multi_gpu tests/parallel --deselect $(FIRST_LAUNCH)

# Sizes of the tree, to keep them in view.
count: setup
	@$(BIN)/python scripts/count.py

wheel: setup-dev
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
