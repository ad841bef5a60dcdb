#!/usr/bin/env bash
# Build the wheel and try it in empty environments, one per extra, and without an extra on each Python of this machine: run.sh PYTHON
# PYTHON has uv beside it, `build`, `hatchling` and `pip`; the environments are made from it. One line per step; the first failure ends it.
set -euo pipefail

python=${1:?usage: tests/wheel/run.sh PYTHON}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
uv=$(dirname "$python")/uv
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/tests/pythons/find-python.sh"
work=$(mktemp -d "${TMPDIR:-/tmp}/txbox-wheel-XXXXXX")
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH TXBOX_DATABASE_URL AWS_ENDPOINT_URL AWS_ENDPOINT_URL_SQS
# The database's user must be able to pass through to the programs of the [embedded] extra.
chmod 755 "$work"
cd "$work"
bin=$work/environment/bin

# step WHAT COMMAND...: run quietly; on failure show what it said, and end. (Within `if`, bash's own -e is off: what
# has several commands joins them by &&.)
step() {
  local what=$1 begun=$SECONDS
  shift
  if "$@" >"$work/step.log" 2>&1; then
    echo "ok    $what ($((SECONDS - begun)) s)"
  else
    echo "FAILED $what: $*" >&2
    tail -n 30 "$work/step.log" >&2
    exit 1
  fi
}

build() {
  "$python" -m build --wheel --no-isolation --outdir "$work/dist" "$root" \
    && wheel=$(echo "$work"/dist/txbox-*.whl)
}

contents() {
  "$python" - "$wheel" <<'PYTHON'
import sys
import zipfile
from email.parser import Parser

with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = wheel.namelist()
    info = next(name for name in names if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(info).decode())
    executable = wheel.getinfo("txbox_spark/runtime/java_home/bin/java").external_attr >> 16 & 0o111
packages = {"txbox", "txbox_workers", "txbox_aws", "txbox_cli", "txbox_celery", "txbox_dashboard", "txbox_django", "txbox_http", "txbox_local", "txbox_demo", "txbox_testing", "txbox_spark", "pyspark_txbox", "txbox_migrations"}
roots = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
assert roots == packages, f"packages: {roots}"
for package in packages:
    assert f"{package}/__init__.py" in names, f"{package} has no __init__.py"
    assert f"{package}/py.typed" in names, f"{package} has no py.typed"
for needed in (
    "txbox_cli/__main__.py",
    "txbox_cli/templates/worker/test_billing.py.tmpl",
    "txbox_cli/templates/fastapi/app.py.tmpl",
    "txbox_cli/templates/django/billing/__init__.py.tmpl",
    "txbox_cli/templates/lambda/event.json.tmpl",
    "txbox_demo/data/cdnow_master.txt.gz",
    "txbox_demo/data/README.md",
    "txbox_demo/data/account.sql",
    "txbox_dashboard/static/htmx.min.js",
    "txbox_dashboard/static/NOTICE.txt",
    "txbox_dashboard/templates/layout.html",
    "txbox_migrations/history/env.py",
    "txbox_migrations/steps/step_010_baseline.py",
    "txbox_migrations/steps/step_011_inbox_destinations.py",
    "txbox_django/management/commands/txbox_worker.py",
    "txbox_django/migrations/0001_baseline.py",
    "txbox_django/migrations/0002_inbox_destinations.py",
):
    assert needed in names, f"{needed} is missing"
assert executable, "txbox_spark/runtime/java_home/bin/java may not be executed"
ours = [name for name in names if not name.endswith(".tmpl")]  # what `txbox init` writes has tests
unwanted = [name for name in ours if "test_" in name or "conftest" in name or name.endswith((".pyc", ".log"))]
assert not unwanted, f"unwanted: {unwanted}"
assert any(name.endswith("/licenses/LICENSE") for name in names), "no licence"
extras = set(metadata.get_all("Provides-Extra"))
known = "all asyncio asyncpg aws celery cli dashboard django embedded http otel prometheus spark typed"
assert extras == set(known.split()), f"extras: {extras}"
PYTHON
}

# environment EXTRAS [PYTHON]: a new environment with the wheel and these extras. It has no pip of its own, and nothing is
# compiled that is not imported: both save minutes.
environment() {
  rm -rf "$work/environment" && "${2:-$python}" -m venv --without-pip "$work/environment" && grown "$1"
}

# grown EXTRAS: the environment at hand gets these extras. They need all that is in it, so it is what a new one would be.
grown() {
  install "$wheel${1:+[$1]}"
}

# Our own environment has all that is pinned, so it lies in uv's cache: to ask the index again costs a minute for Spark.
install() {
  local from
  for from in --offline --no-offline; do
    "$uv" --quiet pip install "$from" --python "$bin/python" -c "$root/constraints.txt" "$@" && return
  done
  return 1
}

# found VERSION: print the path of a Python of this version, or nothing. 3.14 is gotten where it is missing, and kept for
# `make test-pythons`.
found() {
  local own
  own=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  if [[ $1 == "$own" ]]; then
    echo "$python"
  elif ! find_python "$1" "$python" && [[ $1 == 3.14 ]]; then
    "$root/tests/pythons/get-python.sh" "${python%/bin/*}-turn-python3.14" || true
  fi
}

# What is installed is what metadata asks for on this Python, and txbox alone asks for three packages. Only `packaging` is
# lent to the environment, to read its metadata.
core_alone() {
  mkdir -p "$work/lent"
  ln -sfn "$("$python" -c 'import packaging; print(packaging.__path__[0])')" "$work/lent/packaging"
  "$uv" --quiet pip check --python "$bin/python" && PYTHONPATH=$work/lent "$bin/python" - <<'PYTHON'
from importlib.metadata import distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def asked_for(name, extras):
    for line in distribution(name).requires or ():
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield canonicalize_name(one.name), frozenset(one.extras)


core = dict(asked_for("txbox", ()))
assert core == {"sqlalchemy": frozenset(), "alembic": frozenset(), "psycopg": frozenset({"binary"})}, core
reached, waiting = set(), {("txbox", frozenset())}
while waiting:
    one = waiting.pop()
    reached.add(one)
    waiting |= set(asked_for(*one)) - reached
installed = {canonicalize_name(one.name) for one in distributions()}
assert installed == {name for name, _ in reached}, f"more or less than core: {installed ^ {name for name, _ in reached}}"
PYTHON
}

# core_imports: what needs nothing but core, and the driver with its own libpq.
core_imports() {
  imports "txbox, txbox_migrations, txbox_workers, txbox.testing, txbox.inbox.inbox, txbox.outbox.outbox" \
    && "$bin/python" -c 'import psycopg; assert psycopg.pq.__impl__ == "binary", psycopg.pq.__impl__'
}

# refused PYTHON: neither pip nor uv takes the wheel for this Python, and each says which one it wants.
refused() {
  if "$1" -m pip download --no-deps --dest "$work/refused" "$wheel" \
    || "$uv" pip install --offline --no-deps --target "$work/refused" --python "$1" "$wheel"; then
    return 1
  fi 2>"$work/err"
  cat "$work/err"
  grep -q "^ERROR: Package 'txbox' requires a different Python: [0-9.]* not in '>=3\.11'$" "$work/err" \
    && grep -q "txbox==[0-9.]* depends on Python>=3\.11" "$work/err"
}

# pip only warns of an extra that does not exist: the errors below name what is missing then.
unknown_extra_is_told() {
  "$python" -m pip --python "$bin/python" install --dry-run --no-index "$wheel[sqss]" >"$work/out" 2>&1 \
    && grep -q "^WARNING: txbox [0-9.]* does not provide the extra 'sqss'$" "$work/out"
}

lacks() {
  "$bin/python" -c 'import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, sys.argv[1:])))' "$@"
}

# remedy PATTERN COMMAND...: the command fails with one line on stderr that matches, and nothing else.
remedy() {
  local pattern=$1 status=0
  shift
  "$@" >"$work/out" 2>"$work/err" || status=$?
  cat "$work/err"
  [[ $status == 1 && ! -s $work/out && $(wc -l <"$work/err") == 1 ]] && grep -q -- "$pattern" "$work/err"
}

imports() { "$bin/python" -W error -c "import $1"; }

doors_ask() {
  "$bin/python" -W error - <<'PYTHON'
import importlib

DOORS = {
    "http": "txbox_http", "celery": "txbox_celery", "django": "txbox_django", "dashboard": "txbox_dashboard",
    "aws": "txbox_aws.clients", "spark": "pyspark_txbox", "prometheus": "txbox.instrumentation.prometheus",
    "otel": "txbox.instrumentation.opentelemetry",
}
for extra, door in DOORS.items():
    try:
        importlib.import_module(door)
    except ModuleNotFoundError as error:
        assert str(error).endswith(f" is missing; install it: pip install '.[{extra}]' in a clone of txbox"), error
    else:
        raise SystemExit(f"{door} was imported without {extra}")
PYTHON
}

# Without a database: it says so.
exporter_answers() {
  local exporter status=0
  "$bin/txbox" exporter --url postgresql://nobody@127.0.0.1:1/x --port 0 >"$work/exporter.out" 2>&1 &
  exporter=$!
  "$bin/python" - "$work/exporter.out" <<'PYTHON' || status=$?
import re
import sys
import time
import urllib.request

deadline = time.monotonic() + 60
while not (found := re.search(r"http://\S+/metrics", open(sys.argv[1]).read())):
    assert time.monotonic() < deadline, "it does not say where it listens"
    time.sleep(0.1)
with urllib.request.urlopen(found[0], timeout=30) as answer:
    assert b"txbox_exporter_up 0.0" in answer.read()
PYTHON
  kill "$exporter" && wait "$exporter" && return "$status"
}

# A host that has pytest and txbox, and uses nothing of the plugin.
plugin_is_idle() {
  mkdir -p "$work/idle" && echo 'def test_nothing(): pass' >"$work/idle/test_nothing.py" && cat >"$work/idle/conftest.py" <<'PYTHON' && pytest_passes "$work/idle"
import sys


def pytest_sessionfinish():
    assert "txbox_testing.plugin" in sys.modules
    assert not {"txbox", "sqlalchemy", "psycopg"} & set(sys.modules)
PYTHON
}

plugin_tries() {
  mkdir -p "$work/trial" && cat >"$work/trial/test_trial.py" <<'PYTHON' && pytest_passes "$work/trial"
from txbox import Message, Outbox


def handler(session, message):
    Outbox().publish(session, "own:there", b"")


def test_trial(txbox_trial):
    assert txbox_trial(handler, Message("p-1", b"")).ok
PYTHON
}

pytest_passes() {
  install pytest && "$bin/python" -m pytest -q --rootdir "$1" "$1"
}

typed_bodies() {
  "$bin/python" -W error - <<'PYTHON'
from dataclasses import dataclass

from txbox import InvalidConfiguration, Message
from txbox.messages import MessageType
from txbox.messages.body import written


@dataclass
class Purchase:
    cents: int


try:
    assert MessageType(Purchase).read(Message("m-1", written(Purchase(5)))) == Purchase(5)
except InvalidConfiguration as error:
    raise SystemExit(str(error)) from None
PYTHON
}

dashboard_starts() { imports txbox_dashboard && "$bin/txbox" dashboard --help; }

step "the wheel is built" build
step "it holds typed packages, the data, the history, and no tests" contents

for version in 3.11 3.12 3.13 3.14; do
  other=$(found "$version")
  if [[ -z $other ]]; then
    echo "pass  this machine has no Python $version"
    continue
  fi
  step "[] Python $version: installs" environment "" "$other"
  step "[] Python $version: core's dependencies are there, and nothing else" core_alone
  step "[] Python $version: import" core_imports
done
if old=$(find_python 3.10 "$python") && "$old" -c 'import pip'; then
  step "[] Python 3.10 is refused" refused "$old"
else
  echo "pass  this machine has no Python 3.10, which would be refused"
fi

step "[typed] installs" environment typed
step "[typed] a message type reads a body, and writes one" typed_bodies

step "[] installs" environment ""
step "[] import txbox, txbox_migrations, txbox_workers, txbox.testing" \
  imports "txbox, txbox_migrations, txbox_workers, txbox.testing"
step "[] neither boto3, typer, rich, pydantic, moto nor pyspark is there" lacks boto3 typer rich pydantic moto pyspark
step "[] txbox names the extra" remedy "pip install '\.\[cli\]'" "$bin/txbox" status
step "[] the worker and its memory source" imports "txbox_workers.worker, txbox_workers.memory_source"
step "[] a message type names the extra" remedy "pip install '\.\[typed\]'" typed_bodies

step "[sqss] pip warns of an extra that does not exist" unknown_extra_is_told
step "[] what needs an extra names it" doors_ask
step "[] pytest finds the plugin, which imports nothing" plugin_is_idle

step "[aws] installs" grown aws
step "[aws] every module that uses boto3, and those for coroutines" \
  imports "txbox_aws.sqs.async_worker, txbox_aws.lambda_.async_handler, txbox_aws.lambda_, txbox_aws.publishers, txbox_aws.dynamodb, txbox_aws.step_functions"

step "[django] installs" environment django
step "[django] import" imports "txbox_django, txbox_django.operations"
step "[celery] installs" grown celery
step "[celery] import" imports txbox_celery

step "[cli,aws,embedded] installs" environment cli,aws,embedded
step "[cli,aws,embedded] a trial, by the plugin" plugin_tries
step "[cli,aws,embedded] txbox demo --purchases 200" "$bin/txbox" demo --purchases 200 --without-spark

step "[cli] installs" environment cli
step "[cli] txbox --help" "$bin/txbox" --help
step "[cli] python -m txbox_cli --version" "$bin/python" -m txbox_cli --version
step "[cli] neither boto3 nor moto is there" lacks boto3 moto
step "[cli] txbox demo names what is missing" remedy "pip install '\.\[" "$bin/txbox" demo --purchases 10
step "[cli] txbox bulk-load names what is missing" remedy "pip install '\.\[spark" "$bin/txbox" bulk-load x.jsonl \
  --subscriber billing --message-id id --apply /dev/stdin --url postgresql://nobody@127.0.0.1:1/x <<<"SELECT * FROM fresh_event"
step "[cli] txbox dashboard names what is missing" remedy "pip install '\.\[dashboard" "$bin/txbox" dashboard \
  --url postgresql://nobody@127.0.0.1:1/x
step "[cli] txbox dev names what is missing" remedy "pip install '\.\[" "$bin/txbox" dev

step "[dashboard] installs" grown dashboard
step "[dashboard] import, txbox dashboard --help" dashboard_starts
step "[dashboard] neither boto3 nor pyspark is there" lacks boto3 pyspark

step "[http] installs" environment http
step "[http] import" imports txbox_http
step "[http] neither boto3 nor typer is there" lacks boto3 typer

step "[cli,prometheus] installs" environment cli,prometheus
step "[cli,prometheus] import" imports "txbox.instrumentation.prometheus, txbox.status.exporter.prometheus"
step "[cli,prometheus] neither boto3 nor pyspark is there" lacks boto3 pyspark
step "[cli,prometheus] txbox exporter --help" "$bin/txbox" exporter --help
step "[cli,prometheus] txbox exporter answers a scrape" exporter_answers

step "[otel] installs" environment otel
step "[otel] import" imports txbox.instrumentation.opentelemetry

step "[spark] installs" environment spark
step "[spark] import txbox_spark" imports "txbox_spark, pyspark_txbox"

echo "the wheel is good (${SECONDS} s)"
