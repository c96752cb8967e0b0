# Everything runs in a virtual environment of its own, .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The development pin. The package itself asks for torch >= 2.11; TORCH= picks another.
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find csrc fused_ops/_version.py setup.py pyproject.toml -type f)

.PHONY: help demo test lint format docs bench gpu clean
help:
	@echo "make demo    install, build, and run the ops on myoglobin"
	@echo "make test    install, build, and run all tests"
	@echo "make lint    ruff, clang-format, mypy"
	@echo "make docs    HTML pages in docs/_build/html"
	@echo "make bench   the ops against the eager reference and other opponents, 5 minutes on a CPU"
	@echo "make gpu     the whole GPU round: gpu tests, compute-sanitizer, benchmark"

demo: $(VENV)/installed
	@echo "== running examples/myoglobin.py"
	$(BIN)/python examples/myoglobin.py

test: $(VENV)/installed
	@echo "== running the tests"
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal tests/

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

docs: $(VENV)/docs
	$(BIN)/sphinx-build -q -W docs docs/_build/html
	@echo "== docs/_build/html/index.html"

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks

gpu:
	bash benchmarks/gpu_round.sh

$(VENV)/torch:
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@echo "== installing PyTorch ($(TORCH)) and the build tools; this can take some minutes"
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)" numpy setuptools ninja pybind11
	@touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	@echo "== building fused-ops, about a minute"
	$(PIP) --no-build-isolation -e ".[demo,test]"
	@$(BIN)/python -c "from fused_ops._library import build_info; b = build_info(); \
	print('== built', b['version'], 'with CUDA kernels for ' + ', '.join(b['archs']) \
	if b['archs'] else 'without CUDA kernels: nvcc was not found or FUSED_OPS_CUDA=0')"
	@touch $@

$(VENV)/dev: $(VENV)/installed
	$(PIP) -e ".[dev]" --no-build-isolation
	@touch $@

$(VENV)/docs: $(VENV)/installed
	$(PIP) -e ".[docs]" --no-build-isolation
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info docs/_build fused_ops/*.so
