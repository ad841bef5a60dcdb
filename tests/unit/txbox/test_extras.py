"""Without an extra, what needs it says which one to install."""

import asyncio
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from txbox import extras
from txbox.errors import ExtraMissing, InvalidConfiguration
from txbox.postgres.drivers import greenlets

ENTRY_MODULES = {
    "txbox_http": "http",
    "txbox_celery": "celery",
    "txbox_django": "django",
    "txbox_django.operations": "django",
    "txbox_dashboard": "dashboard",
    "txbox_cli.http_server": "dashboard",
    "txbox_aws.clients": "aws",
    "txbox_aws.dynamodb.items": "aws",
    "txbox_aws.publishers.faults": "aws",
    "txbox_spark.source": "spark",
    "pyspark_txbox": "spark",
    "txbox.instrumentation.prometheus": "prometheus",
    "txbox.status.exporter.prometheus": "prometheus",
    "txbox.instrumentation.opentelemetry": "otel",
    "txbox.instrumentation.opentelemetry_tracing": "otel",
}
"""Where the modules of an extra come in, and its name."""

# A program, because what is imported already cannot be missing; one for all of them.
WITHOUT_EXTRAS = """
import importlib, sys
from txbox.extras import MODULES

class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name in modules for modules in MODULES.values()):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, type(error).__name__, type(error.__cause__).__name__, error, sep="|")
    else:
        print(name, "was imported", "", "", sep="|")
import txbox_spark, txbox_testing.plugin
try:
    txbox_spark.runtime.lazy_imports.pyarrow.Table
except ImportError as error:
    print("pyarrow", type(error).__name__, type(error.__cause__).__name__, error, sep="|")
"""


def test_each_entry_module_names_its_extra() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *ENTRY_MODULES], capture_output=True, text=True, timeout=60, check=True
    )
    said = {module: words for module, *words in (line.split("|") for line in ended.stdout.splitlines())}
    assert said.keys() == {*ENTRY_MODULES, "pyarrow"}
    for module, (kind, cause, text) in said.items():
        assert (kind, cause) == ("ExtraMissing", "ModuleNotFoundError"), (module, text)
        extra = ENTRY_MODULES.get(module, "spark")
        named = re.fullmatch(rf"(\w+) is missing; install it: pip install '\.\[{extra}\]' in a clone of txbox", text)
        assert named, (module, text)
        assert named[1] in extras.MODULES[extra]


def test_only_a_module_of_the_extra_is_told_as_missing() -> None:
    with pytest.raises(ExtraMissing) as told, extras.needs("aws"):
        raise ModuleNotFoundError("No module named 'boto3.session'", name="boto3.session")
    assert (told.value.extra, told.value.name) == ("aws", "boto3.session")
    assert str(told.value).startswith("boto3.session is not in the boto3 that is found; install it: ")
    for name in ("shop", "celery", "boto3_shop", None):
        theirs = ModuleNotFoundError(f"No module named {name!r}", name=name)
        with pytest.raises(ModuleNotFoundError) as passed, extras.needs("aws"):
            raise theirs
        assert passed.value is theirs


def test_an_error_within_is_told_once() -> None:
    with pytest.raises(ExtraMissing) as told, extras.needs("cli"), extras.needs("dashboard"):
        raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
    assert str(told.value) == "jinja2 is missing; install it: pip install '.[dashboard]' in a clone of txbox"
    with pytest.raises(ExtraMissing) as told, extras.needs("http"), extras.needs("dashboard"):
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette")
    assert told.value.extra == "dashboard", "the nearest one"


def test_coroutines_name_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "greenlet", raising=False)
    monkeypatch.setattr(greenlets, "find_spec", lambda _: None)
    with pytest.raises(InvalidConfiguration, match=r"greenlet, which is not installed: pip install '\.\[asyncio\]'"):
        asyncio.run(greenlets.run_in_greenlet(print))


def test_each_module_comes_with_its_extra() -> None:
    distributions = importlib.metadata.packages_distributions()
    for extra, modules in extras.MODULES.items():
        brought = {canonicalize_name(name) for name in _brought("txbox", extra)}
        for module in modules:
            assert brought.intersection(map(canonicalize_name, distributions[module])), (extra, module)


def _brought(distribution: str, extra: str = "") -> Iterator[str]:
    for requirement in map(Requirement, importlib.metadata.requires(distribution) or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement.name
            for inner in requirement.extras or [""]:
                yield from _brought(requirement.name, inner)
