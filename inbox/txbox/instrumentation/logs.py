"""Events as lines of Python's logging: under ``txbox.relay``, ``.maintenance``, ``.audit``, or else ``.worker``."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from txbox.instrumentation import events
from txbox.instrumentation.events import MAINTAINER, Event
from txbox.instrumentation.log_context import in_hand
from txbox.outbox.outbox import RELAY_SUBSCRIBER
from txbox.outcome import Outcome
from txbox.postgres.sqlstates import CONFLICTS
from txbox.text import text_of

_maintenance_log = logging.getLogger("txbox.maintenance")
_relay_log = logging.getLogger("txbox.relay")
_worker_log = logging.getLogger("txbox.worker")
_audit_log = logging.getLogger("txbox.operations.audit")

_LOGS = {RELAY_SUBSCRIBER: _relay_log, MAINTAINER: _maintenance_log}

_SETTLED_LEVEL = {
    Outcome.PROCESSED: logging.DEBUG,
    Outcome.DUPLICATE: logging.DEBUG,
    Outcome.IN_FLIGHT: logging.INFO,
    Outcome.FAILED: logging.WARNING,
    Outcome.DEAD: logging.ERROR,
    Outcome.MISMATCH: logging.ERROR,
    Outcome.EXPIRED: logging.ERROR,
}


def log_event(event: Event) -> None:
    """Log one event: the usual ones at DEBUG, those that an operator should see at a higher level.

    Bodies and headers are never logged: they may contain secrets.
    """
    message_id = getattr(event, "message_id", None)
    with in_hand(event.subscriber_id, () if message_id is None else (message_id,)):
        _log_event(event)


def _log_event(event: Event) -> None:
    name = event.subscriber_id
    log = _LOGS.get(name, _worker_log)
    match event:
        case events.Received():
            log.debug("%s received %d messages", name, len(event.message_ids))
        case events.Committed():
            log.debug(
                "%s committed %d messages, %d duplicates, in %.3f s", name, event.first, event.duplicates, event.seconds
            )
        case events.Settled():
            level = _SETTLED_LEVEL[event.outcome]
            error = f"{type(event.error).__name__}: {_text(event.error)}" if event.error else ""
            because = f": {error}" if error else ""
            because += f"; what counted: {_attempts(event.counted, error)}" if event.counted else ""
            log.log(level, "%s %s %s (delivery %d)%s", name, event.outcome, event.message_id, event.attempts, because)
            if not event.acked and event.outcome.acked:
                log.warning(
                    "%s could not ack %s; the broker may deliver it again, as a duplicate",
                    name,
                    event.message_id,
                )
        case events.Contended():
            log.warning(_CONTENDED, name, _conflicts(event.conflicts), _MODES.get(event.mode, event.mode))
        case events.Retried():
            log.info("%s retries %d messages after %s, run %d", name, event.messages, event.sqlstate, event.attempt)
        case events.Relayed():
            level = logging.ERROR if event.parked else logging.WARNING if event.postponed else logging.DEBUG
            because = f": {event.error}" if event.error else ""
            line = "%s sent %d messages to %s, postponed %d, parked %d%s"
            log.log(level, line, name, event.sent, event.source, event.postponed, event.parked, because)
        case events.Maintained():
            rate = event.removed / max(event.seconds, 0.001)
            log.info("%s: removed %d rows in %.1f s, %.0f per second", event.source, event.removed, event.seconds, rate)
        case events.BulkLoaded():
            counted = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in event.counts.items() if count)
            source = event.source if event.batch_id is None else f"{event.source} batch {event.batch_id}"
            log.info("%s from %s: %s, in %.1f s", name, source, counted or "no rows", event.seconds)
        case events.PublisherOverdue():
            line = "%s: the publisher of %s was given %d messages, and has not returned for %g s"
            log.error(line, name, event.source, event.messages, event.seconds)
        case events.HeartbeatFailed():
            log.warning(
                "%s could not extend its right to %s, which may be delivered again meanwhile: %s",
                name,
                event.message_id,
                event.why,
            )
        case events.BrokerLost():
            log.warning(
                "%s cannot reach the broker, next try in %.1f s: %s", name, event.pause_seconds, _text(event.error)
            )
        case events.DatabaseLost():
            log.warning(
                "%s cannot use the database, next try in %.1f s: %s", name, event.pause_seconds, _text(event.error)
            )
        case events.BrokerRestored():
            log.info("%s reaches the broker again", name)
        case events.DatabaseRestored():
            log.info("%s can use the database again", name)
        case events.Paused():
            because = f" ({' '.join(event.note.split())})" if event.note else ""
            log.warning("%s is paused by %s%s: %s", name, event.paused_by, because, event.source)
        case events.Drained():
            log.warning("%s is drained, as it is paused: nothing of %s is in hand", name, event.source)
        case events.Resumed():
            log.warning("%s is resumed: %s", name, event.source)
        case events.Stopped():
            log.info(
                "%s stopped%s",
                name,
                "" if event.drained else " before everything was finished; the rest is delivered again",
            )
        case events.Audited():
            level = logging.INFO if event.balanced else logging.ERROR
            counts = ", ".join(f"{count:,} {what}" for what, count in event.counts.items() if count)
            verdict = "balanced" if event.balanced else "NOT balanced"
            _audit_log.log(level, "audit of %s from %s: %s; %s", name, event.source, verdict, counts or "no messages")
        case _:
            log.debug("%s %r", name, event)


def _attempts(counted: Sequence[Mapping[str, Any]], last: str) -> str:
    """Return which deliveries counted, and each error once: the line has said the ``last`` one."""
    deliveries: dict[str, list[str]] = {}
    for one in counted:
        deliveries.setdefault(" ".join(one["error"].split()), []).append(str(one["delivery"]))
    return "; ".join(
        f"{'delivery' if len(numbers) == 1 else 'deliveries'} {', '.join(numbers)}: "
        f"{'this error' if error == last else error}"
        for error, numbers in deliveries.items()
    )


def _conflicts(conflicts: Mapping[tuple[str, str], int]) -> str:
    """Return how often each conflict happened, and on what: ``3 deadlocks on stock``."""
    return ", ".join(
        f"{count:,} {CONFLICTS.get(code, code)}{'' if count == 1 else 's'}" + (f" on {relation}" if relation else "")
        for (code, relation), count in sorted(conflicts.items())
    )


_CONTENDED = (
    "%s has conflicts with other transactions: %s since the last report; nothing is lost, and messages are processed "
    "%s. Have handlers lock rows in one order"
)

_MODES = {
    "batch": "in batches, as before",
    "halves": "in half batches, for now",
    "per_message": "in a transaction each, for now",
    "serial": "by one transaction at a time, for now",
}


def _text(error: BaseException) -> str:
    """Return an error's text on one line, without the statement values that SQLAlchemy's own text quotes."""
    cause = error.__cause__
    if cause is not None and text_of(cause) == text_of(error):
        error = cause
    original = getattr(error, "orig", None)
    return " ".join(text_of(original if isinstance(original, BaseException) else error).split())
