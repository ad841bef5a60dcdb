"""Modules that are imported at their first use are sent to executors, copied and inspected as others are."""

import copy
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException

from txbox_spark.runtime import lazy_imports


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: cloudpickle.loads(cloudpickle.dumps(module)),
    ],
    ids=["copy", "deepcopy", "pickle", "cloudpickle"],
)
def test_a_module_is_copied_and_pickled_by_its_name(again: Callable[[Any], Any], used: bool) -> None:
    module = lazy_imports._Module("json.decoder")
    if used:
        assert module.JSONDecoder
    found = again(module)
    assert vars(found) == {"_name": "json.decoder"}
    assert found.JSONDecoder is module.JSONDecoder


def test_looking_for_a_special_method_imports_nothing() -> None:
    module = lazy_imports._Module("txbox_spark.no_such_module")
    assert not hasattr(module, "__wrapped__")
    assert inspect.unwrap(module) is module
    with pytest.raises(ModuleNotFoundError):
        assert module.anything


def test_pyspark_client_has_no_jvm_whose_errors_could_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(lazy_imports.spark_errors(ValueError)) == 3
    monkeypatch.setitem(sys.modules, "py4j.protocol", None)
    assert lazy_imports.spark_errors(ValueError) == (PySparkException, ValueError)
