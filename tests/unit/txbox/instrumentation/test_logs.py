"""Events as log lines: what a person should see, and how loud."""

import logging

import pytest
from sqlalchemy.exc import DBAPIError

from txbox import Outcome
from txbox import instrumentation as events
from txbox.instrumentation.logs import log_event

WHO = ("billing", "queue")


def settled(outcome: Outcome, *, acked: bool, error: Exception | None = None) -> events.Settled:
    return events.Settled(*WHO, "m-1", "receipt", outcome, acked, 3, error)


LINES: list[tuple[events.Event, int, str]] = [
    (events.Received(*WHO, ("m-1", "m-2"), ("r-1", "r-2")), logging.DEBUG, "billing received 2 messages"),
    (events.Committed(*WHO, 3, 1, 0.25), logging.DEBUG, "billing committed 3 messages, 1 duplicates, in 0.250 s"),
    (
        events.Contended(*WHO, {("40P01", "stock"): 3, ("40001", ""): 1}, "serial"),
        logging.WARNING,
        (
            "billing has conflicts with other transactions: 1 serialization failure, 3 deadlocks on stock since the "
            "last report; nothing is lost, and messages are processed by one transaction at a time, for now. Have "
            "handlers lock rows in one order"
        ),
    ),
    (events.Retried(*WHO, "40001", 2, 10), logging.INFO, "billing retries 10 messages after 40001, run 2"),
    (settled(Outcome.PROCESSED, acked=True), logging.DEBUG, "billing processed m-1 (delivery 3)"),
    (settled(Outcome.DUPLICATE, acked=True), logging.DEBUG, "billing duplicate m-1 (delivery 3)"),
    (settled(Outcome.IN_FLIGHT, acked=False), logging.INFO, "billing in_flight m-1 (delivery 3)"),
    (
        settled(Outcome.FAILED, acked=False, error=ValueError("no stock")),
        logging.WARNING,
        "billing failed m-1 (delivery 3): ValueError: no stock",
    ),
    (settled(Outcome.DEAD, acked=True), logging.ERROR, "billing dead m-1 (delivery 3)"),
    (settled(Outcome.MISMATCH, acked=True), logging.ERROR, "billing mismatch m-1 (delivery 3)"),
    (settled(Outcome.EXPIRED, acked=True), logging.ERROR, "billing expired m-1 (delivery 3)"),
    (
        events.HeartbeatFailed(*WHO, "m-1", "expired"),
        logging.WARNING,
        "billing could not extend its right to m-1, which may be delivered again meanwhile: expired",
    ),
    (
        events.PublisherOverdue(*WHO, 3, 60.0),
        logging.ERROR,
        "billing: the publisher of queue was given 3 messages, and has not returned for 60 s",
    ),
    (
        events.BrokerLost(*WHO, OSError("gone"), 1.5),
        logging.WARNING,
        "billing cannot reach the broker, next try in 1.5 s: gone",
    ),
    (events.Paused(*WHO, "anna", "re\npairs"), logging.WARNING, "billing is paused by anna (re pairs): queue"),
    (events.Drained(*WHO), logging.WARNING, "billing is drained, as it is paused: nothing of queue is in hand"),
    (events.Resumed(*WHO), logging.WARNING, "billing is resumed: queue"),
    (events.BrokerRestored(*WHO), logging.INFO, "billing reaches the broker again"),
    (
        events.DatabaseLost(*WHO, OSError("gone"), 2.0),
        logging.WARNING,
        "billing cannot use the database, next try in 2.0 s: gone",
    ),
    (events.DatabaseRestored(*WHO), logging.INFO, "billing can use the database again"),
    (
        events.Maintained("txbox:maintenance", "inbox", 500, 2.0),
        logging.INFO,
        "inbox: removed 500 rows in 2.0 s, 250 per second",
    ),
    (
        events.BulkLoaded("billing", "bulk load", {"applied": 1_000, "rejected": 0, "already_processed": 7}, 2.0),
        logging.INFO,
        "billing from bulk load: 1,000 applied, 7 already processed, in 2.0 s",
    ),
    (
        events.BulkLoaded("billing", "stream 0b7f", {"applied": 1}, 2.0, "4c1d", 17),
        logging.INFO,
        "billing from stream 0b7f batch 17: 1 applied, in 2.0 s",
    ),
    (
        events.Audited(*WHO, {"sent": 1_000, "missing": 0}, True, 1.5),
        logging.INFO,
        "audit of billing from queue: balanced; 1,000 sent",
    ),
    (
        events.Audited(*WHO, {"sent": 2, "missing": 1}, False, 1.5),
        logging.ERROR,
        "audit of billing from queue: NOT balanced; 2 sent, 1 missing",
    ),
    (events.Stopped(*WHO, True), logging.INFO, "billing stopped"),
    (
        events.Stopped(*WHO, False),
        logging.INFO,
        "billing stopped before everything was finished; the rest is delivered again",
    ),
]


@pytest.mark.parametrize(("event", "level", "line"), LINES, ids=lambda value: type(value).__name__)
def test_an_event_is_one_line(event: events.Event, level: int, line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "txbox"):
        log_event(event)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, line)]


def test_an_ack_that_failed_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "txbox"):
        log_event(settled(Outcome.PROCESSED, acked=False))
    assert caplog.messages == ["billing could not ack m-1; the broker may deliver it again, as a duplicate"]


def test_a_database_error_is_one_line_without_the_values_of_its_statement(caplog: pytest.LogCaptureFixture) -> None:
    refused = DBAPIError("INSERT INTO account", {"card": "4111"}, Exception("permission denied\nHINT: grant it"))
    unavailable = RuntimeError(str(refused))
    unavailable.__cause__ = refused
    with caplog.at_level(logging.DEBUG, "txbox"):
        log_event(settled(Outcome.FAILED, acked=False, error=refused))
        log_event(events.DatabaseLost(*WHO, unavailable, 2.0))
    assert caplog.messages == [
        "billing failed m-1 (delivery 3): DBAPIError: permission denied HINT: grant it",
        "billing cannot use the database, next try in 2.0 s: permission denied HINT: grant it",
    ]


def test_lines_of_relays_and_of_workers_have_their_own_loggers(caplog: pytest.LogCaptureFixture) -> None:
    log_event(events.BrokerLost("txbox:outbox", "own:somewhere", OSError("gone"), 1.5))
    log_event(events.BrokerLost(*WHO, OSError("gone"), 1.5))
    assert [record.name for record in caplog.records] == ["txbox.relay", "txbox.worker"]


def test_every_outcome_has_a_level() -> None:
    outcomes = {event.outcome for event, _, _ in LINES if isinstance(event, events.Settled)}
    assert outcomes == set(Outcome)


def test_an_event_that_is_not_known_here_is_written_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Rebalanced(events.Event):
        pass

    with caplog.at_level(logging.DEBUG, "txbox"):
        log_event(Rebalanced(*WHO))
    assert "Rebalanced" in caplog.text
