# `make repro` and `make test` each work alone in a fresh clone.
PYTHON ?= python3
VENV := .venv
# stages call `python`: let it be the one that has everything installed
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME

.PHONY: setup repro test lint

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

repro: setup
	dvc repro

test: setup lint
	pytest

lint: setup
	ruff check .
	ruff format --check .
	lint-imports
