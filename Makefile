# `make help` lists the targets. `make run` and `make test` need Python 3.11 or newer and nothing else.
# What a run and its tables need is installed first, the rest when a target asks for it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
EVERYTHING := $(VENV)/.everything
PIP_INSTALL := $(BIN)/python -m pip install --constraint constraints.txt --editable
EXTRAS ?= dev,tables,floors,hub,wandb,tensorboard,parallel,slurm,tune,bench
# Tests in a process for each core, more than eight of which seldom pay.
PARALLEL ?= --numprocesses auto --maxprocesses 8 --dist worksteal
TASK ?= listops
HARDWARE ?= cpu
MODELS ?= $(shell sed -n 's/^_target_: models\.\([a-z0-9_]*\)\..*/\1/p' configs/model/*.yaml | paste -sd, -)

.PHONY: help setup run test test-slow test-mutants lint data sweep tables tables-check bench bench-check
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(EVERYTHING)  ## make .venv and install everything into it: tests, loggers, launchers

$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	@echo "installing what a run and its tables need into $(VENV): some 30 packages, 1.1 GB with"
	@echo "PyTorch for the CPU; where pip takes PyTorch with CUDA, several GB (README, Start)"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) '.[tables]'
	@touch $@

$(EVERYTHING): $(CORE)
	@echo "installing tests, loggers, launchers and readers: some 90 more packages, 0.9 GB"
	$(PIP_INSTALL) '.[$(EXTRAS)]'
	@touch $@

run: $(CORE)  ## the main job: Luna on ListOps with a short budget, ending in a table
	$(BIN)/python run.py model=luna task=listops experiment=quickstart
	$(BIN)/python scripts/make_tables.py
	@echo
	@echo "That was the whole way: data, training, test, a record of the run, tables."
	@echo "Where to look:  results/report.html, in a browser: tables, learning curves, every run"
	@echo "                outputs/: the folder of the run, with its log and its weights"
	@echo "What to type next, after  source $(VENV)/bin/activate"
	@echo "  python scripts/use_model.py $$(dirname $$(ls -t outputs/*/config.yaml | head -1))"
	@echo "                ask the model that you have trained about test examples"
	@echo "  python run.py model=softmax task=listops experiment=quickstart"
	@echo "                another model, the same way"
	@echo "  python run.py model=luna task=listops"
	@echo "                the first real entry: all 5,000 steps, some 25 minutes on two cores"

test: $(EVERYTHING)  ## the fast tests
	@echo "the fast tests: some 10 minutes on two cores; a dot for each test, and at the end why"
	@echo "tests were skipped. Those that take minutes each are left out: make test-slow"
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(EVERYTHING)  ## the tests that take minutes
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not timed"
	$(BIN)/python -m pytest -m "slow and timed"

test-mutants: $(EVERYTHING)  ## break the code in many places and see whether the tests notice (minutes)
	$(BIN)/python tests/mutants.py

lint: $(EVERYTHING)  ## formatting, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

data: $(EVERYTHING)  ## fetch the public sources and build the caches of all tasks
	bash scripts/get_data.sh data all || echo "not everything could be fetched; see above" >&2
	$(BIN)/python scripts/prepare_data.py task=all

tables: $(CORE)  ## records -> leaderboard, paper tables, figures, report page
	$(BIN)/python scripts/make_tables.py

tables-check: $(CORE)  ## fail if a table, figure or page is not what the records say
	$(BIN)/python scripts/make_tables.py --check

sweep: $(CORE)  ## all models or MODELS=luna,s4d, three seeds, resumable; TASK=listops HARDWARE=cpu
	$(BIN)/python run.py -m model=$(MODELS) task=$(TASK) hardware=$(HARDWARE) seed=0,1,2

bench: $(CORE)  ## speed and memory by length, all models, into results/benchmarks/
	$(BIN)/python scripts/benchmark.py

bench-check: $(CORE)  ## fail if a model has lost speed against others of the same call
	$(BIN)/python scripts/benchmark.py --check
