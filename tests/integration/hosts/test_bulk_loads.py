"""What docs/hosts.md says of bulk loads and hosts, in the process that has Spark."""

import pytest
from pyspark.sql import SparkSession

from integration.hosts.page import CELLS, check_cell
from integration.hosts.roads import by_load
from integration.hosts.shapes import Server


@pytest.mark.parametrize(
    "host", [host for (host, road), cell in CELLS.items() if (road, cell != "none") == ("Bulk load", True)]
)
def test_a_load_is_exact_or_refused_in_one_line(
    server: Server, spark: SparkSession, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_cell(server, host, "Bulk load", lambda place: by_load(place, spark), caplog)
