"""Which tests must not run side by side in a run of several processes, and that their groups begin first.

A plugin of pytest. pytest-xdist's own groups go by marks which it writes into the ids of tests, and pytest 9.2 does not
let it; here they go by the folder or file.
"""

from typing import Any

import pytest

GROUPS = {
    # Two JVMs are enough: each needs a gigabyte, and seconds to start. Both groups take about as long.
    "tests/integration/txbox_spark/loading/": "spark 2",
    "tests/integration/txbox_spark/merging/": "spark 2",
    "tests/integration/txbox_spark/reading/": "spark 2",
    "tests/integration/txbox_cli/test_archive_commands.py": "spark 2",
    "tests/integration/txbox_cli/test_loads_commands.py": "spark 2",
    "tests/integration/txbox_cli/test_source_commands.py": "spark 2",
    "tests/integration/txbox_testing/test_loads.py": "spark 2",
    "tests/integration/txbox_testing/test_writers.py": "spark 2",
    "tests/integration/txbox_spark/": "spark",
    "tests/integration/hosts/test_bulk_loads.py": "spark",
    "tests/acceptance/spark/": "spark",
    "tests/integration/txbox_celery/": "celery",  # one Valkey, and tests in a row share a worker
    "tests/acceptance/demo/": "demo",  # they look for what other demos have left on their servers
    "tests/unit/txbox_demo/": "demo",  # of unit tests, these alone need a Postgres: one process starts it
}
"""Folders and files whose tests run in one process, one after the other, and the name of their group: the first that
fits."""


def group_of(nodeid: str) -> str | None:
    """Return the group of a test; None if it may run beside any other."""
    return next((group for place, group in GROUPS.items() if nodeid.startswith(place)), None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have the groups begin first, where other tests run beside them."""
    if hasattr(config, "workerinput"):
        order = list(dict.fromkeys(GROUPS.values()))
        items.sort(key=lambda item: order.index(group) if (group := group_of(item.nodeid)) else len(order))


@pytest.hookimpl(optionalhook=True)  # there is no such hook without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand the tests of a group to one process, whichever is free."""
    from xdist.scheduler import LoadGroupScheduling

    class ByGroup(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid) or nodeid

    return ByGroup(config, log)
