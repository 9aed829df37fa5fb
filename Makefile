# Needs only Python 3.11+ and make; every target sets up what it uses.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ds4-installed

.PHONY: demo test fuzz setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("ds4 needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/ds4 --raw-prompt -p "Once upon a time" -n 160 --seed 11 --temp 0.7

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest
	$(BIN)/python -m fuzz replay

# Minutes of new inputs for each target; crashers land in fuzz/corpus and are replayed by `make test`.
fuzz: $(STAMP)
	$(BIN)/python -m fuzz run --seconds 120

clean:
	rm -rf $(VENV) build dist *.egg-info
