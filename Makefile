# From a bare machine with Python 3.11 and make: `make demo` shows the main job, `make test` runs the tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-gpu check lint types docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/collab demo

test: setup
	$(BIN)/python -m pytest -n 2

# On a machine with a CUDA device. PYTHON names an interpreter that has torch, transformers, safetensors and pytest.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: setup
	$(BIN)/mypy

check: lint types test

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist demo-output site
