# `make run` trains specs/tiny.par, `make sample` lets it write; `make test` checks everything. Both set up .venv on first use.

# Another interpreter has an environment of its own: `make test PYTHON=python3.12` sets up .venv-python3.12.
PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
# Threads are shared by all processes of a run; the runtime divides the cores among its ranks by itself.
# Tests start processes by the hundred, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run sample test tests lint types soak gpu fuzz planted grammar docs site clean

run: $(VENV)/installed
	$(BIN)/partita run specs/tiny.par "train.checkpoint=every(100)"

# Text of the model that `make run` has trained.
sample: $(VENV)/installed
	$(BIN)/partita sample specs/tiny.par

test: lint
	$(MAKE) --no-print-directory --jobs 2 types tests

# Collected once by one process, beside mypy: three would compile all modules, each for itself. On two cores one of three
# waits for a disk or for processes of its own, more often than not.
tests: $(VENV)/installed
	@$(BIN)/pytest --collect-only >/dev/null 2>&1 || true
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -rs -m "not soak"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

# Long runs: exhaustive and randomised, minutes to hours; and all other tests with examples that nobody has seen.
soak: $(VENV)/soaked
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "not soak" --hypothesis-profile=new
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak --timeout 7200 -s

# Everything to run when a GPU is at hand, in ten minutes; its figures go to the end of bench/notes/gpu.md. Without one it runs
# what it can on the CPU, says what it could not do, and ends with status 4. The environment has torch for CPUs: on a machine with
# GPUs, `make gpu GPU_PYTHON=python3` takes an interpreter that has torch for CUDA, attrs, rich, lark, numpy, safetensors,
# hypothesis, pytest and pytest-timeout.
GPU_PYTHON ?=
gpu: $(if $(GPU_PYTHON),,$(VENV)/installed)
	$(if $(GPU_PYTHON),PYTHONPATH=$(CURDIR)/.types $(GPU_PYTHON),$(BIN)/python) bench/gpu.py --append

# Fuzzing alone: `make fuzz FUZZ_SECONDS=600`. Runs add up, in .fuzz; what is found belongs into tests/fuzz/corpus.
FUZZ_SECONDS ?= 7200
fuzz: $(VENV)/soaked
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

# How much tests and `verify` notice: mistakes planted one at a time, `make planted PLANTED="gradients norm-not-a-root"`.
PLANTED ?=
planted: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.planted --jobs 2 $(PLANTED)

# The parser's table and the grammar of editors are made from the grammar, and kept; tests hold them there.
grammar: $(VENV)/installed
	$(BIN)/python -m tests.dsl.parse_table
	$(BIN)/python -m tests.cli.editor.textmate

# The outputs that the pages show; tests hold them there.
docs: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.docs

# The documentation as a site, in build/site.
site: $(VENV)/installed
	$(BIN)/mkdocs build --strict

# Python compiles what it imports: of all that is installed that is little.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --upgrade pip "setuptools>=77"
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[test]"
	touch $@

$(VENV)/soaked: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[soak]"
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
