"""The final stage: Spark loads the whole file while the workers still process a part of it.

They share one inbox, so it does not matter which comes first. The workers' purchases are spread over the whole file. A
third of them is published before the load has merged its first chunk. No mails are sent: a load catches up on the past.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from txbox import Outbox, Outgoing, TxboxError
from txbox.messages.destinations import INBOX
from txbox.postgres.urls import DATABASE_URL_VARIABLE
from txbox_demo.checker import ACCOUNTS, DemoReport, check
from txbox_demo.processes import N_DUPLICATES, DemoTask
from txbox_demo.purchases import TOTAL_PURCHASES, Purchase, read_purchases
from txbox_demo.sandbox import OnProgress, Sandbox
from txbox_demo.services import BILLING_FIELDS, BILLING_FILE
from txbox_demo.supervisor import DemoSupervisor, Group
from txbox_local.errors import log_tail

WORKERS_STRIDE, BEFORE_STRIDE = 10, 3  # one of ten purchases also goes to the workers, one of three of these at once
CHUNK_ROWS = 10_000  # small, so that the workers meet the load in many chunks


def run_spark_stage(
    sandbox: Sandbox, task: DemoTask, directory: Path, cleanup: ExitStack, on_progress: OnProgress
) -> DemoReport:
    """Load the whole file while workers process a part of it, in a sandbox of its own, as in ``run_demo``."""
    begun, purchases = time.monotonic(), list(read_purchases())
    (directory := directory / "final-stage").mkdir()  # both stages have a billing 1, and logs are named after processes
    chosen = purchases[::WORKERS_STRIDE]
    waiting = [[one for number, one in enumerate(chosen) if number % BEFORE_STRIDE]]
    groups = [Group("billing", 2)]
    if not task.queue_urls[0].startswith(INBOX):
        groups.append(Group("relay", 1))
    supervisor = DemoSupervisor(groups, task, sandbox, directory)
    cleanup.callback(supervisor.kill)
    load = _start_load(task, purchases, directory)
    cleanup.callback(load.wait)
    cleanup.callback(load.kill)
    _publish(sandbox, chosen[::BEFORE_STRIDE])

    def is_ending() -> bool:
        if waiting and sandbox.count("bulk_load_chunk"):
            _publish(sandbox, waiting.pop())
        if status := load.poll():
            why = log_tail(directory / "load.log", 1) or "its log is empty"
            raise TxboxError(f"the bulk load ended with status {status}: {why}")
        return status == 0 and not waiting

    stage = "final stage: Spark loads the whole file beside the workers"
    supervisor.drive(stage, on_progress, is_ending, lambda now: now.billed >= TOTAL_PURCHASES)
    report, recorded = check(sandbox.engine, purchases, (), ACCOUNTS), sandbox.count("processed_message")
    loaded = json.loads((directory / "load.json").read_text())
    figures = {
        "read by Spark": (loaded["read"], f"writer {loaded['writer']}, {loaded['chunks']} chunks"),
        "applied by Spark": (loaded["applied"], "purchases that it was first with"),
        "found processed": (loaded["already_processed"], "purchases that workers were first with"),
        "applied by workers": (recorded - loaded["applied"], f"of {len(chosen):,}, two thirds after the first chunk"),
        "rejected by workers": (supervisor.groups[0].count(N_DUPLICATES), "also what Spark was first with"),
    }
    return replace(report, figures=figures, seconds=round(time.monotonic() - begun, 1))


def _publish(sandbox: Sandbox, purchases: Sequence[Purchase]) -> None:
    queue_url = sandbox.queue_urls[0]
    messages = [Outgoing(queue_url, one.as_json(), key=one.customer_id, message_id=one.order_id) for one in purchases]
    with sandbox.engine.begin() as connection:
        Outbox().publish_many(connection, messages)


def _start_load(task: DemoTask, purchases: Sequence[Purchase], directory: Path) -> subprocess.Popen[bytes]:
    """Start `txbox bulk-load` on the whole file as a person would: with the workers' effect, and no outbox."""
    events = directory / "purchases.jsonl"
    events.write_text("".join(f"{purchase.as_json()}\n" for purchase in purchases))
    command = [sys.executable, "-m", "txbox_cli", "bulk-load", str(events), "--subscriber", "billing", "--json"]
    command += ["--message-id", "order_id", "--fields", BILLING_FIELDS]
    command += ["--apply", str(BILLING_FILE), f"--chunk-rows={CHUNK_ROWS}"]
    environment = {**os.environ, **task.environment, DATABASE_URL_VARIABLE: task.database_url}
    with (directory / "load.json").open("wb") as out, (directory / "load.log").open("wb") as log:
        # A session of its own and no stdin: what is typed is for this program.
        empty = subprocess.DEVNULL
        return subprocess.Popen(command, stdin=empty, stdout=out, stderr=log, env=environment, start_new_session=True)
