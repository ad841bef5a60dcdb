"""``txbox relay`` as a process: it sends, it finishes what it has begun, it says why it cannot start."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine

from support.program import PASSWORD, Ended, Running, own_module
from support.waiting import wait_until
from txbox.outbox import Outbox

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

pytestmark = pytest.mark.chaos

Txbox = Callable[..., Ended]

MODULE = """
import os
from pathlib import Path
from sqlalchemy import create_engine
from txbox.relay import Relay, Refused

here = Path(__file__).parent
engine = create_engine(os.environ["TXBOX_DATABASE_URL"])

class Publisher:
    def send(self, messages):
        for message in messages:
            if message.key == "slow":
                (here / "sending").touch()
                with (here / "gate").open() as opened:  # a named pipe: this waits until the test opens it too
                    opened.readline()
            if message.key != "refused":
                with (here / "sent").open("a") as sent:
                    sent.write(f"{message.id}\\n")
        return [Refused(message, "no") for message in messages if message.key == "refused"]

publishers = {"own": Publisher()}
relay = Relay(engine, publishers)
"""


@pytest.fixture
def directory(tmp_path: Path, schema_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop.py").write_text(MODULE)
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setenv("TXBOX_DATABASE_URL", schema_url)
    return tmp_path


def publish(engine: Engine, destination: str, key: str | None = None, message_id: str | None = None) -> str:
    with engine.begin() as connection:
        return Outbox().publish(connection, destination, "{}", key=key, message_id=message_id)


def rows(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())


def test_it_sends_to_aws_and_to_publishers_of_ones_own_until_sigterm(
    directory: Path, engine: Engine, queue: str, sqs: "SQSClient"
) -> None:
    ours, theirs = publish(engine, "own:x"), publish(engine, queue)
    publish(engine, "own:x", key="refused")
    options = ("--senders", "2", "--max-attempts", "1", "--keep-sent", "1h", "--batch-size", "10")
    with Running("relay", "shop:publishers", *options, cwd=directory) as running:
        running.says("to sqs, sns, eventbridge, own, keeping what was sent for 1h; Ctrl-C finishes and stops")
        wait_until(lambda: rows(engine, "outbox_message") == 0, "the outbox is empty")
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
    assert running.out[-1] == "stopped: 2 sent, 1 refused\n"
    assert PASSWORD not in "".join(running.err)
    assert (directory / "sent").read_text() == f"{ours}\n"
    (message,) = sqs.receive_message(QueueUrl=queue, MessageAttributeNames=["All"])["Messages"]
    assert message["MessageAttributes"]["message-id"]["StringValue"] == theirs
    assert (rows(engine, "outbox_sent"), rows(engine, "dead_letter"), rows(engine, "outbox_relay")) == (2, 1, 0)


def test_what_was_begun_is_finished_on_ctrl_c(directory: Path, engine: Engine) -> None:
    publish(engine, "own:x", key="slow")
    with Running("--log-level", "info", "relay", "shop:relay", cwd=directory) as running:
        wait_until((directory / "sending").exists, "the message is being sent")
        running.signal(signal.SIGINT)
        running.says("SIGINT: finishing what was begun")
        assert not (directory / "sent").exists()
        with (directory / "gate").open("r+b", buffering=0) as gate:  # for both, so that this end waits for nobody
            gate.write(b"go on\n")
            assert running.wait() == 0
    assert running.out == [
        "shop:relay is at work; Ctrl-C finishes and stops\n",
        "stopped: 1 sent, 0 refused\n",
    ]
    assert rows(engine, "outbox_message") == 0


def test_what_is_not_finished_in_time_is_status_1_and_stays(directory: Path, engine: Engine) -> None:
    publish(engine, "own:x", key="slow")
    with Running("relay", "shop:publishers", "--stop-seconds", "0.2", cwd=directory) as running:
        wait_until((directory / "sending").exists, "the message is being sent")
        running.signal(signal.SIGTERM)
        assert running.wait() == 1
    assert running.err[-1] == "txbox: not finished within 0.2 s; what was being sent may be sent again\n"
    wait_until(lambda: rows(engine, "outbox_message") == 1)


# --- what cannot start -----------------------------------------------------------------------------------------------


def test_a_relay_has_its_own_settings(txbox: Txbox, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module(monkeypatch, directory, "shop")
    txbox("relay", "shop:relay", "--senders", "2", "--no-listen").failed_in_one_line(
        2, "shop:relay is a relay, which has its own settings; leave out --senders, --no-listen"
    )
    txbox("relay", "shop:engine").failed_in_one_line(
        2, "is a Engine, neither a relay nor publishers by scheme; run `txbox relay shop:publishers` or `txbox relay"
    )
