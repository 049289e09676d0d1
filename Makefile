PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS = 1
export OPENBLAS_NUM_THREADS = 1

.PHONY: demo quick test lint bench soak docs clean

.venv/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; say make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[data,plot]'
	touch $@

.venv/.developer: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[data,plot,train,llm,dev]'
	touch $@

.venv/.bench: .venv/.developer
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[data,plot,train,llm,dev,bench]'
	touch $@

demo: .venv/.installed  ## real runs and exact games, credited by four methods; writes demo/
	$(BIN)/counterpoint demo -o demo --force

lint: .venv/.developer  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

quick: lint  ## lint and the fast tests
	$(BIN)/pytest -n 2 -m 'not slow and not soak'

test: lint  ## everything but the full sizes
	$(BIN)/pytest -n 2 -m 'not soak'
	$(BIN)/python docs/sizes.py

soak: .venv/.developer  ## the full sizes
	$(BIN)/pytest -n 2

bench: .venv/.bench  ## speed against peers, as ratios; writes docs/benchmarks.md
	$(BIN)/python -m benchmarks

docs: .venv/.developer  ## generate the reference pages from the tables
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv demo dist
