# `make demo` and `make test` do all the set-up on a fresh machine; the rest is for development.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(shell find cuda flashtrie_cli -name '*.py' -o -name '*.c*' -o -name '*.h*')

.PHONY: demo test lint native test-native test-gpu bench-gpu sanitize-gpu clean

# One environment for everything: the package with its native engine, tokenizers, and what the tests need.
$(VENV)/.installed: $(SOURCES)
	@echo "Installing into $(VENV). The native engine is compiled, and the kernels where nvcc is found: a few minutes."
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[dev,tokenizers]'
	@touch $@

demo: $(VENV)/.installed
	@PATH="$(abspath $(BIN)):$$PATH" sh sample_data/demo.sh

test: $(VENV)/.installed
	$(BIN)/pytest -q

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# In-place build of the extension, for working from the checkout (needs nanobind in the active Python).
native:
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) >/dev/null
	cmake --build build/dev

# The headers by themselves, the kernels where nvcc is found, and the host engine under ASan and UBSan.
test-native:
	tests/native/run_sanitized.sh

# On a machine with a GPU: every test that needs one, and none may skip.
test-gpu:
	$(PYTHON) -m pytest -q -m gpu --gpu-required tests

# The figures of docs/benchmarks/gpu_search.md; LOAD names its keys and grids.
bench-gpu:
	PYTHONPATH=. $(PYTHON) docs/benchmarks/gpu_search.py $(LOAD)

# compute-sanitizer over searches by every kernel, over token masks and token-trie steps, and over draft trees.
sanitize-gpu:
	PYTHONPATH=. $(PYTHON) docs/benchmarks/sanitize_search.py
	PYTHONPATH=. $(PYTHON) docs/benchmarks/sanitize_masks.py
	PYTHONPATH=. $(PYTHON) docs/benchmarks/sanitize_draft.py

clean:
	rm -rf build $(VENV) flashtrie_cli/_native*.so
