# `make help` lists the targets. `make run` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= dev,tables,hub

.PHONY: help setup run test test-slow lint data sweep tables bench
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

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

data: setup  ## build the caches of all tasks whose data are there
	$(BIN)/python scripts/prepare_data.py task=listops

tables: setup  ## records -> leaderboard
	$(BIN)/python scripts/make_tables.py

sweep:  ## all models x all tasks x three seeds (not there yet)
	@echo "make sweep: not there yet; python run.py -m model=softmax,luna seed=0,1,2 runs a sweep" >&2; exit 1

bench:  ## speed and memory by length, all models (not there yet)
	@echo "make bench: not there yet" >&2; exit 1
