# Each target makes the environment it needs when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
ON_TWO_CORES := --numprocesses 2 --no-loadscope-reorder --durations=20

.PHONY: setup demo test test-all lint house check soak bench bench-peers bench-storm test-peers gpu docs notebooks wheel smoke clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

demo: setup
	$(BIN)/starling demo

# For each change; meant to take 5 minutes on two idle cores.
test: setup
	$(BIN)/python -m pytest -m 'not soak and not wide' $(ON_TWO_CORES)

# For each merge; meant to take 12 minutes on two idle cores.
test-all: setup
	STARLING_REHEARSAL=gpu $(BIN)/python -m pytest -m 'not soak' $(ON_TWO_CORES)

soak: setup
	$(BIN)/python -m pytest -m soak

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.house --code

# How large and how finely cut the source is, and how many files a mini-batch passes.
house: setup
	$(BIN)/python -m tools.house

check: lint test

bench: setup
	$(BIN)/python -m benchmarks.run --output bench.json

# On a machine with a CUDA device, within 25 minutes.
gpu: setup
	$(BIN)/python -m pytest -m 'not soak' -rs tests/gpu
	$(BIN)/python -m benchmarks.run --only one_learner two_learners --output bench-gpu.json

# The documentation site, in site/. A broken link and an undocumented public name are errors.
docs: setup
	$(BIN)/python -m tools.documentation build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The tutorials as notebooks, in build/notebooks/.
notebooks: setup
	$(BIN)/python -m tools.documentation.notebooks build/notebooks

# A wheel and an sdist in dist/. The same commit gives the same bytes: times are those of the commit.
wheel: setup
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m hatchling build --directory dist

# The wheel works in an empty environment. TORCH=torch==2.10.0 tests another torch than the pinned one.
smoke: wheel
	.ci/smoke dist/*.whl $(TORCH)

bench-peers: $(PEERS)/ready
	$(PEERS)/bin/python -m benchmarks.peers --output bench-peers.json

# torchft's DiLoCo in the storm of docs/running.md, on an idle machine; it takes 11 minutes.
bench-storm: $(PEERS)/ready
	$(PEERS)/bin/python -m benchmarks.torchft_storm --output torchft-storm.json 2> torchft-storm.log

# The arithmetic of our strategies against that of the same methods in other libraries.
test-peers: $(PEERS)/ready
	$(PEERS)/bin/python -m pytest tests/test_torchft.py

# An environment that sees all of .venv, torch included, and has Starling's peers beside it.
$(PEERS)/ready: benchmarks/peers-requirements.txt $(VENV)/ready
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python benchmarks/see_packages_of.py $(abspath $(VENV))
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist site
