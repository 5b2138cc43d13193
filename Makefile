# Each target makes .venv by itself when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint check soak bench gpu clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,cloud,dask,dev]'
	@touch $@

demo: setup
	$(BIN)/starling train recipes/demo.yaml

test: setup
	$(BIN)/python -m pytest -m 'not soak' --numprocesses 2 --no-loadscope-reorder

soak: setup
	$(BIN)/python -m pytest -m soak

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

bench: setup
	$(BIN)/python -m benchmarks.run --output bench.json

# On a machine with a CUDA device, within 25 minutes.
gpu: setup
	$(BIN)/python -m pytest -m 'not soak' -rs tests/gpu
	$(BIN)/python -m benchmarks.run --only one_learner two_learners --output bench-gpu.json

clean:
	rm -rf $(VENV) build dist
