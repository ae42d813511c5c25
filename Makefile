# `make demo` and `make test` do all the set-up on a fresh machine; the rest is for development.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint native clean

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard cuda/*/*) $(shell find flashtrie_cli -name '*.py')
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[dev]'
	touch $@

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# In-place build of the extension, for working from the checkout (needs nanobind in the active Python).
native:
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$$(command -v $(PYTHON)) >/dev/null
	cmake --build build/dev

clean:
	rm -rf build $(VENV) flashtrie_cli/_native*.so
