"""Processes of the demo that do one thing wrong, or note what they do: they take the place of those in ``ROLES``."""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from txbox import Message, Outbox
from txbox.leases import Lease, PostgresLedger
from txbox.relay import OutboxMessage, Refused
from txbox_demo import processes
from txbox_demo.processes import DemoTask, MortalOutbox
from txbox_demo.services import send_mail

ORDER, OTHER_ORDER = "cdnow-00007", "cdnow-00008"
"""The order that is lost, and the one that is doubled."""

Run = Callable[[DemoTask], None]


def take_place(patch: pytest.MonkeyPatch, run: Run, *, moments: tuple[str, ...] | None = None) -> None:
    """Have a role run another function, named as the one in its place with something before it."""
    (role,) = (name for name in processes.ROLES if run.__name__.endswith(f"_{name}"))
    patch.setitem(processes.ROLES, role, (run, moments or processes.ROLES[role][1]))


def noted(directory: Path, what: str) -> Counter[str]:
    """Return what processes have noted, and how often."""
    return Counter(line for file in directory.glob(f"*.{what}") for line in file.read_text().splitlines())


def _note(what: str, name: str) -> None:
    with Path(os.environ["AWS_TEST_NOTES"], f"{os.getpid()}.{what}").open("a") as file:
        file.write(f"{name}\n")


def failing_relay(task: DemoTask) -> None:
    raise ValueError(f"no relay in slot {task.slot}")


def patient_notification(task: DemoTask) -> None:
    """No lease runs out but those of killed workers."""
    processes.LEASE_SECONDS = 10.0
    processes.run_notification(task)


def careless_notification(task: DemoTask) -> None:
    """It does not send one mail, and sends another one twice."""

    def send(message: Message, lease: Lease, smtp_port: int) -> None:
        for _ in range({ORDER: 0, OTHER_ORDER: 2}.get(message.json()["order_id"], 1)):
            send_mail(message, lease, smtp_port)

    processes.send_mail = send
    patient_notification(task)


def forgetful_notification(task: DemoTask) -> None:
    """The ledger forgets what is completed whenever it is asked again; each mail is noted."""

    def send(message: Message, lease: Lease, smtp_port: int) -> None:
        send_mail(message, lease, smtp_port)
        _note("mail", message.json()["order_id"])

    acquire = PostgresLedger.acquire

    def acquire_anew(self: PostgresLedger, message_id: str, **options: Any) -> Any:
        with task.engine().begin() as connection:
            forget = "UPDATE message_lease SET completed_at = NULL, failures = attempts WHERE message_id = :id"
            connection.execute(text(f"{forget} AND completed_at IS NOT NULL"), {"id": message_id})
        return acquire(self, message_id, **options)

    processes.send_mail = send
    PostgresLedger.acquire = acquire_anew  # type: ignore[method-assign]
    patient_notification(task)


class _OwnTransaction(Outbox):
    """Publishes in a transaction of its own, which a rollback of the session's does not take back."""

    def publish(self, session: Any, destination: str, body: Any, **options: Any) -> Any:
        with session.get_bind().engine.begin() as connection:
            return super().publish(connection, destination, body, **options)

    def publish_many(self, connection_or_session: Any, messages: Any) -> list[str]:
        with connection_or_session.engine.begin() as connection:
            ids = super().publish_many(connection, messages := list(messages))
        for message in messages:
            _note("published", json.loads(message.body)["order_id"])
        return ids


class _OwnTransactionOfBilling(MortalOutbox, _OwnTransaction):
    """Dies when that one has committed."""


def careless_shop(task: DemoTask) -> None:
    processes.DECLINED_SHARE = 0.2
    processes.Outbox = _OwnTransaction  # type: ignore[misc]
    processes.run_shop(task)


def careless_billing(task: DemoTask) -> None:
    """It publishes in a transaction of its own, and notes each order that it has published."""
    processes.MortalOutbox = _OwnTransactionOfBilling  # type: ignore[misc]
    processes.run_billing(task)


class _Losing:
    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher

    def send(self, messages: Sequence[OutboxMessage]) -> Sequence[Refused]:
        kept = [one for one in messages if one.id != ORDER]
        return list(self.publisher.send(kept)) if kept else []


def losing_relay(task: DemoTask) -> None:
    """It confirms an order that it has not sent."""
    publishers = processes.aws_publishers
    processes.aws_publishers = lambda **_: {"sqs": _Losing(publishers()["sqs"])}  # type: ignore[assignment, dict-item]
    processes.run_relay(task)


def idle_billing(_: DemoTask) -> None:
    signal.pause()  # until it is killed
