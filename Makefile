# Two commands do everything, set-up included: `make train` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DONE   := $(VENV)/.setup-done
EXTRAS := kernels,data,hub,eval,report,dev

.PHONY: setup train test test-slow test-gpu lint format wheel clean

setup: $(DONE)

# --no-compile: byte-compiling the dependencies takes longer than unpacking them.
$(DONE): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (about a minute)…"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

train: setup
	$(BIN)/tercet train --preset tiny

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two workers, one thread each: two cores are what CI has. Files stay whole, for what their tests share.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -m slow

# On a machine with a CUDA device; uses whatever Python holds torch there: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu tests

wheel: setup
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
