# From a bare machine with Python 3.11 and make: `make demo` shows the main job, `make test` runs the tests.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo browser test test-gpu memcheck check lint types docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/collab demo

test: setup
	$(BIN)/python -m pytest -n 2

# For the tests of reports as a browser shows them, which are skipped without one. Where none can be installed it says so.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
		if command -v $$name; then exit 0; fi; done; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
		chromium fonts-dejavu-core \
		|| echo "chromium could not be installed: tests that need a browser are skipped"; \
	else echo "no chromium, and no right to install it: tests that need a browser are skipped"; fi

# On a machine with a CUDA device. OPTIONS are pytest's. PYTHON names an interpreter that has torch, transformers,
# safetensors and pytest.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests $(OPTIONS)

# One pass of every kernel under NVIDIA's checker of memory accesses; on such a machine, too.
memcheck:
	PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		compute-sanitizer --tool memcheck --error-exitcode 1 $(PYTHON) benchmarks/memcheck.py

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
