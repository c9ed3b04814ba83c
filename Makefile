# Each target works alone on a fresh clone: it makes the virtual environment, installs what it
# needs, and does its job. PYTHON picks the interpreter (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

OLDEST := $(VENV)/oldest
OLDEST_STAMP := $(OLDEST)/.installed

.PHONY: demo test more long oldest lint format tables clean

demo: $(STAMP)
	$(BIN)/poros demo

test: $(OLDEST_STAMP)
	$(MAKE) --no-print-directory --jobs=2 --output-sync lint oldest
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# What takes longer: tests that are slow, and gates of every family.
more: $(STAMP)
	$(BIN)/pytest -m slow --numprocesses auto --maxprocesses 8 --dist worksteal
	$(BIN)/poros gate --matrix ci

# And longer yet, before a release: every way of loading for every family, every negative control,
# loads that are killed twenty times, environments that are made anew.
long: $(STAMP)
	$(BIN)/pytest -m long --numprocesses auto --maxprocesses 8 --dist worksteal


oldest: $(OLDEST_STAMP)
	PYTHONPATH=$(OLDEST) $(BIN)/pytest tests/test_smoke.py -m oldest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(STAMP)
	$(BIN)/python benchmarks/validation_tables.py
	$(BIN)/python benchmarks/result_tables.py

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)" --constraint constraints.txt
	$(BIN)/pip install --quiet --editable ".[ml,train,dev]" --constraint constraints.txt
	touch $@

$(OLDEST_STAMP): constraints-oldest.txt $(STAMP)
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(OLDEST) --requirement constraints-oldest.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
