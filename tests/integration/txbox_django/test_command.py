"""``manage.py txbox_worker`` in a process of its own, which is killed and stopped."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.django_shop import project
from support.processes import start_python
from support.waiting import wait_until

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

MESSAGES = 5


@pytest.fixture
def start(django: None, schema_url: str, queue: str) -> Callable[..., "subprocess.Popen[bytes]"]:
    import os

    def start(**variables: str) -> "subprocess.Popen[bytes]":
        env = {**os.environ, **project.environment(schema_url), "QUEUE_URL": queue, **variables}
        return start_python("-m", "django", "txbox_worker", "support.django_shop.worker:make_worker", env=env)

    return start


# A process: it is killed, which no thread can be.
def test_killed_between_commit_and_ack_and_stopped(
    start: Callable[..., "subprocess.Popen[bytes]"], sqs: "SQSClient", queue: str
) -> None:
    for number in range(MESSAGES):
        sqs.send_message(QueueUrl=queue, MessageBody=f"body {number}")
    killed = start(KILL_AT="Committed")
    assert killed.wait(60) == -signal.SIGKILL
    assert project.purchases(), "nothing was committed before"
    successor = start()
    try:
        wait_until(lambda: _left(sqs, queue) == 0, "every delivery is acked", timeout=60)
    finally:
        successor.send_signal(signal.SIGTERM)
        assert successor.wait(60) == 0
    assert len(project.purchases()) == len(set(project.purchases())) == MESSAGES


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("no_such:worker", "", "no_such:worker cannot be imported: No module named 'no_such'; give MODULE:NAME"),
        ("no_worker:worker", "", "no_worker:worker cannot be imported: module 'no_worker' has no attribute 'worker'"),
        ("needs_more:worker", "import not_there", "module needs_more failed: No module named 'not_there'"),
        (
            "no_extra:worker",
            "from txbox.errors import ExtraMissing\nraise ExtraMissing('http', 'anyio')",
            "anyio is missing",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(
    django: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, code: str, said: str
) -> None:
    from django.core.management import CommandError, call_command

    if target != "no_such:worker":
        (tmp_path / f"{target.partition(':')[0]}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CommandError) as told:
        call_command("txbox_worker", target)
    assert str(told.value).startswith(said)


def _left(sqs: "SQSClient", queue: str) -> int:
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=names)["Attributes"]  # type: ignore[arg-type]
    return sum(int(found[name]) for name in names)  # type: ignore[call-overload]
