# Each target works alone on a fresh clone: it makes the virtual environment, installs what it
# needs, and does its job. PYTHON picks the interpreter (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

OLDEST := $(VENV)/oldest
OLDEST_STAMP := $(OLDEST)/.installed

.PHONY: demo test more oldest lint format tables clean

demo: $(STAMP)
	$(BIN)/poros demo

test: $(OLDEST_STAMP)
	$(MAKE) --no-print-directory --jobs=2 --output-sync lint oldest
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# What takes longer: the slow tests of loops, families and graphs, the whole demo, packages that are
# installed and taken away, and gates of every family.
SLOW := tests/semantics tests/families tests/test_demo.py tests/test_graphs.py tests/test_prepare.py
more: $(STAMP)
	$(BIN)/pytest $(SLOW) -m slow --numprocesses auto --maxprocesses 8 --dist worksteal
	$(BIN)/pytest tests/test_third_party.py -m slow -k comes_and_goes
	$(BIN)/poros gate --matrix ci

oldest: $(OLDEST_STAMP)
	PYTHONPATH=$(OLDEST) $(BIN)/pytest tests/test_smoke.py -m oldest --numprocesses auto --maxprocesses 8

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: $(STAMP)
	$(BIN)/python benchmarks/validation_tables.py

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
