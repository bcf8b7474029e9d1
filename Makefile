# `make help` lists the targets. `make run` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev,tables,hub,wandb,tensorboard,parallel,slurm,bench
TASK ?= listops
HARDWARE ?= cpu

.PHONY: help setup run test test-slow lint data sweep tables tables-check bench bench-check
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## make .venv and install everything into it

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

run: setup  ## the main job: Luna on ListOps with a short budget, ending in a table
	$(BIN)/python run.py model=luna task=listops experiment=quickstart
	$(BIN)/python scripts/make_tables.py

test: setup  ## the fast tests
	$(BIN)/python -m pytest

test-slow: setup  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

lint: setup  ## formatting, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

data: setup  ## fetch the public sources and build the caches of all tasks
	bash scripts/get_data.sh data all || echo "not everything could be fetched; see above" >&2
	$(BIN)/python scripts/prepare_data.py task=all

tables: setup  ## records -> leaderboard, paper tables, figures, report page
	$(BIN)/python scripts/make_tables.py

tables-check: setup  ## fail if a table, figure or page is not what the records say
	$(BIN)/python scripts/make_tables.py --check

sweep: setup  ## all models, three seeds, resumable; TASK=listops HARDWARE=cpu unless given
	$(BIN)/python run.py -m model=softmax,luna,nystromformer,fastformer task=$(TASK) \
		hardware=$(HARDWARE) seed=0,1,2

bench: setup  ## speed and memory by length, all models, into results/benchmarks/
	$(BIN)/python scripts/benchmark.py

bench-check: setup  ## fail if a model has lost speed against others of the same call
	$(BIN)/python scripts/benchmark.py --check
