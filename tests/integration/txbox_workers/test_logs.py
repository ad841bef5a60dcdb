"""Each line that is logged while a message is in hand names it: the handler's own, ours, and those of libraries."""

import json
import logging
from collections.abc import Sequence

import pytest
from sqlalchemy import Engine

from support.workers.business import Business
from support.workers.ledger_worker import make as make_with_ledger
from support.workers.memory_worker import messages, numbered, work_off
from txbox import Message
from txbox.instrumentation.json_logs import JsonFormatter
from txbox.leases import PostgresLedger
from txbox_workers.memory_source import MemorySource


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.read: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.read.append(json.loads(self.format(record)))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    lines = Lines()
    for name in ("billing", "txbox"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [lines])
        monkeypatch.setattr(logging.getLogger(name), "level", logging.DEBUG)
    logging.getLogger("billing").manager._clear_cache()  # type: ignore[attr-defined]
    return lines


def handle(_session: object, message: Message) -> None:
    logging.getLogger("billing").info("paid", extra={"message_id": "of another", "amount": 5})
    if message.id == "bad":
        raise ValueError("no")


def test_lines_of_a_handler_and_ours_about_its_message(engine: Engine, business: Business, lines: Lines) -> None:
    work_off(MemorySource(messages("a", "bad"), batch_size=2), engine, handle, max_attempts=1)
    paid = [line for line in lines.read if line["message"] == "paid"]
    assert {(line["subscriber_id"], line["message_id"]) for line in paid} == {("billing", "a"), ("billing", "bad")}
    assert {line["amount"] for line in paid} == {5}
    settled = {line["message_id"]: line["message"] for line in lines.read if " (delivery 1)" in str(line["message"])}
    assert settled.keys() == {"a", "bad"}
    others = [line for line in lines.read if str(line["message"]).startswith("billing received")]
    assert others
    assert all(line["subscriber_id"] == "billing" and "message_ids" not in line for line in others)


def test_a_batch_handler_has_them_all(engine: Engine, business: Business, lines: Lines) -> None:
    def together(_session: object, several: Sequence[Message]) -> None:
        logging.getLogger("billing").info("paid %d", len(several))

    work_off(MemorySource(numbered(3), batch_size=3), engine, batch_handler=together)
    (paid,) = [line for line in lines.read if line["logger"] == "billing"]
    assert paid["message_ids"] == ["m0000", "m0001", "m0002"]


def test_a_handler_under_a_lease(engine: Engine, lines: Lines) -> None:
    source = MemorySource(messages("a"))

    def send(_message: Message) -> None:
        logging.getLogger("billing").info("sent")

    worker = make_with_ledger(source, PostgresLedger("mailing", engine=engine), send, engine)
    worker.start()
    assert source.wait_until_empty(20)
    assert worker.stop(20)
    (sent,) = [line for line in lines.read if line["message"] == "sent"]
    assert (sent["subscriber_id"], sent["message_id"]) == ("mailing", "a")


def test_what_cannot_be_written_is_still_a_line() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    line = json.loads(JsonFormatter().format(logging.makeLogRecord({"msg": Silent()})))
    assert "Silent" in line["message"]
