import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import txbox_spark
from support.spark.spark_commands import PLAN, Spark
from txbox_cli import spark as cli_spark
from txbox_cli.commands import bulk_load
from txbox_spark import BulkLoadReport, JobProgress, LoadPlan, Reconciliation


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Spark:
    seen = Spark()

    class Session:
        def stop(self) -> None:
            seen.stopped += 1

    def spark_session(name: str, **options: Any) -> Session:
        seen.started = {"name": name, **options}
        return Session()

    def read_events(_: Session, paths: list[str], **options: Any) -> str:
        seen.read = {"paths": paths, **options}
        return "the events"

    def load(frame: str, *, on_progress: Callable[[JobProgress], object], **options: Any) -> BulkLoadReport:
        assert frame == "the events"
        seen.given = options
        for one in seen.progress:
            on_progress(one)
        if seen.drops_an_interrupt:  # as Python does with one that comes out of a finalizer
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
        if seen.raises:
            raise seen.raises
        return seen.report

    def plan_load(frame: str, *, on_progress: Callable[[JobProgress], object], **options: Any) -> LoadPlan:
        seen.given = options
        return PLAN if isinstance(options["apply"], str) else replace(PLAN, statements=())

    def reconcile(frame: str, **options: Any) -> Reconciliation:
        seen.given = options
        return Reconciliation(5, 0, 1, 4, 2, 0, 1, 0, ("a", "b\x1b"), 1, (), None)

    monkeypatch.setattr(txbox_spark, "spark_session", spark_session)
    monkeypatch.setattr(txbox_spark, "read_events", read_events)
    monkeypatch.setattr(txbox_spark, "source_of", lambda *_, **__: "the source")
    monkeypatch.setattr(txbox_spark, "bulk_load", load)
    monkeypatch.setattr(txbox_spark, "plan_load", plan_load)
    monkeypatch.setattr(txbox_spark, "reconcile", reconcile)
    # There is no database, and there are no files.
    monkeypatch.setattr(cli_spark, "check_before_spark", lambda *_, **__: None)
    monkeypatch.setattr(bulk_load, "run_to_resume", lambda _, run: run)
    return seen


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "account.sql"
    file.write_text("SELECT FROM fresh_event")
    return str(file)
