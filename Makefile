# `make` alone lists the tasks. PYTHON is the interpreter that the virtual environment is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
# Processes that tests start compile nothing twice, whatever the environment says.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
export PYTHONDONTWRITEBYTECODE :=
# Nor do they iterate sets in another order each time.
export PYTHONHASHSEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup check test lint types imports pytest spec bench format clean

help: ## list the tasks
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON=python3.12 (setup), ARGS='--impl torch+pr22900' (check, bench, pytest)"

setup: $(READY) ## make .venv with everything the other tasks need

# Done again only when what is to be installed has changed.
$(READY): pyproject.toml ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "setup: $(PYTHON) must be Python 3.11 or newer (set PYTHON=...)" >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || $(PYTHON) -m venv --clear $(VENV) \
	  || { echo "setup: $(PYTHON) has no working venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "setup: installing into $(VENV)"
	@$(PIP) install --quiet --no-compile -c ci/constraints.txt -e '.[test]'
	@touch $@
	@echo "setup: ok"

check: setup ## check an implementation: make check ARGS='--impl torch --tier pr'
	@$(BIN)/kvspec check $(ARGS)

test: setup ## lint, types, imports and all tests: what has to pass before a change goes in
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory -j3 types imports pytest
	@echo "test: ok"

lint: setup ## ruff
	@$(BIN)/ruff check --quiet . && echo "lint: ok"

types: setup ## mypy
	@$(BIN)/mypy --no-error-summary && echo "types: ok"

imports: setup ## import-linter: which folder may import which
	@$(BIN)/lint-imports > $(VENV)/imports.log 2>&1 && echo "imports: ok" \
	  || { cat $(VENV)/imports.log; echo "imports: broken" >&2; exit 1; }

pytest: setup ## the tests alone: make pytest ARGS='-k traces'
	@$(BIN)/python -m pytest --no-header -n auto --dist worksteal $(ARGS) && echo "pytest: ok"

spec: setup ## write SPEC.md and SPEC-REFERENCE.md, from the code
	@$(BIN)/kvspec spec --out SPEC.md && $(BIN)/kvspec spec --reference --out SPEC-REFERENCE.md && echo "spec: ok"

bench: setup ## commands per second of each implementation
	@$(BIN)/python -m ci.bench $(ARGS)

format: setup ## let ruff fix what it can
	@$(BIN)/ruff check --quiet --fix .

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info
