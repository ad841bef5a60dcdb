"""The command reconcile."""

import re

from support.spark.spark_commands import TABLE, URL, WHAT, Spark, Txbox


def test_a_reconciliation_that_is_not_complete_has_exit_status_1(txbox: Txbox, spark: Spark) -> None:
    ended = txbox("reconcile", *WHAT, *URL, "--output", "there", "--sample", "2", "--partitions", "4")
    assert ended.status == 1
    assert re.search(r"^ never processed +2  ", ended.out, re.MULTILINE)
    assert re.search(r"^ expired +1  of those, came too late to be run", ended.out, re.MULTILINE)
    assert "parked" not in ended.out
    assert "never processed: b\\x1b" in ended.out
    assert ended.out.endswith("known to be processed: 2 events were not processed, 0 rows cannot be compared\n")
    assert (spark.given["output"], spark.given["sample"], spark.given["partitions"]) == ("there", 2, 4)
    assert spark.stopped == 1


def test_a_table_has_its_own_columns(txbox: Txbox, spark: Spark) -> None:
    asked = txbox("reconcile", *TABLE, *WHAT[1:], *URL, "--fields", "event_id string")
    asked.failed_in_one_line(2, "--fields is of files; a --source has its own columns")
    assert not spark.started
