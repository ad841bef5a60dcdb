"""Inbox tasks: Celery delivers at least once, late acks included, and the inbox applies once.

::

    Celery   receive ─┐                                             ┌─ result, chain ── ack
    txbox             └─ BEGIN ── record the id ── body ── COMMIT ──┘
                          └ a duplicate: no body
                          └ another transaction has it, or no database: sent again for later, under its id
                          └ a dead letter, another body, too old, no tables: the task fails, and is not retried

A body returns nothing. A duplicate could not return it again: the process that ran the body may have died before it
stored a result or sent what follows in a chain. Without results, every run that ends well ends the same way. What it
sends has the ids that the canvas gave it, so an inbox there also applies it once.
"""

import copy
import functools
import inspect
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from difflib import get_close_matches
from typing import Any
from uuid import UUID

from celery import Celery, Task
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded
from celery.signals import worker_process_init
from kombu.exceptions import SerializationError
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from txbox import (
    Expired,
    Inbox,
    InFlight,
    InvalidConfiguration,
    InvalidMessageId,
    Message,
    Mismatch,
    SchemaMissing,
    TxboxError,
)
from txbox.instrumentation.logs import log_event
from txbox.leases.handlers import signature_of
from txbox_workers.delivery import Delivery
from txbox_workers.handlers import refuse_unfinishable
from txbox_workers.options import ValidOptions
from txbox_workers.processing.handler_transactions import HandlerTransactions, Parked
from txbox_workers.processing.outage_errors import DatabaseUnavailable
from txbox_workers.processing.processor import ProcessorContext

AGAIN_SECONDS = 5.0
"""Delay before a task comes again that another process is running, or that found no database."""

STABLE = (bytes, date, time, timedelta, Decimal, UUID)
"""Types of arguments, besides those of JSON, whose text is the same in every process."""

OWN_OPTIONS = ("message_id", "again_seconds", "bind", "inbox", "engine")
"""Celery takes any option as an attribute of the task, so a misspelt one of these would silently do nothing."""

Body = Callable[..., None]


class MessageParked(TxboxError):
    """The message of a task waits as a dead letter of its subscriber, so the body was not run."""


def inbox_task(
    app: Celery,
    *,
    inbox: Inbox,
    engine: Engine,
    message_id: Callable[..., str] | None = None,
    again_seconds: float = AGAIN_SECONDS,
    bind: bool = False,
    **options: Any,
) -> Callable[[Body], Any]:
    """Make a task of a function whose effects in the database are committed once per message.

    ::

        @inbox_task(app, inbox=Inbox("billing"), engine=engine)
        def add(session, account_id, cents):
            session.execute(...)

        add.apply_async(["ann", 2500], task_id="purchase-17")

    Args:
        app: the Celery application.
        inbox: what was processed; its tables are in the engine's database.
        engine: the database of the inbox and of the body's effects.
        message_id: returns the message's id, given the task's arguments; None: the id of the task, which it keeps
            through retries and redeliveries.
        again_seconds: delay before a task comes again that another process is running, that found no database, or that
            hit a soft time limit after its body; none of these counts as a retry.
        bind: whether the body gets the task first, as with ``app.task``: ``body(self, session, …)``.
        options: those of ``app.task``. ``acks_late`` and ``reject_on_worker_lost`` are True.

    A task whose message waits as a dead letter fails with ``MessageParked``. A task whose id came with other arguments
    before fails with ``Mismatch``, and one that is too old to judge with ``Expired``. No body is run, and
    ``autoretry_for`` does not apply to these errors.

    Returns:
        A decorator of ``body(session, …)``, which returns None and leaves commit and rollback alone; ``session`` is in
        the transaction that has recorded the message.

    Raises:
        InvalidConfiguration: an option, or the body, cannot work.
        TypeError: an option is misspelt: close to one of these, and not one of Celery's.
    """
    for name in ("acks_late", "reject_on_worker_lost"):
        if not options.setdefault(name, True):
            raise InvalidConfiguration(f"inbox_task.{name} must be True: what is acked before its commit may be lost")
    if again_seconds <= 0:
        raise InvalidConfiguration(f"inbox_task.again_seconds must be more than 0, not {again_seconds!r}")
    base = options.get("base") or app.Task
    for name in options:
        meant = get_close_matches(name, OWN_OPTIONS, n=1, cutoff=0.75)
        if meant and not hasattr(base, name):
            raise TypeError(f"inbox_task has no option {name}; did you mean {meant[0]}?")
    kept = options.get("dont_autoretry_for", getattr(base, "dont_autoretry_for", ()))
    options["dont_autoretry_for"] = (*kept, *NOT_RETRIED)
    options["retry"] = _retry  # Celery makes options attributes, whatever base the app has when it is finalized

    def decorate(body: Body) -> Any:
        work = _TaskRunner(body, inbox=inbox, engine=engine, seconds=options.get("time_limit"), bind=bind)

        @functools.wraps(body)
        def run(task: Task, *args: Any, **kwargs: Any) -> None:
            given_id = task.request.id if message_id is None else message_id(*args, **kwargs)
            if given_id is None:
                raise InvalidConfiguration(
                    f"{task.name} was called as a function, so it has no id: call {task.name}.delay(…), or give "
                    "inbox_task a message_id"
                )
            call = _Call(task, args, kwargs)
            try:
                work.do(call, given_id)
            except (InFlight, DatabaseUnavailable) as error:
                if isinstance(error.__cause__, SchemaMissing):  # until somebody creates them; nothing is lost meanwhile
                    _log.error("%s waits, and is sent again every %g s: %s", task.name, again_seconds, error.__cause__)
                _send_again(task, again_seconds, error)
            except SoftTimeLimitExceeded as error:
                if not call.has_returned:
                    raise
                _send_again(task, again_seconds, error)  # it may have committed

        run.__signature__ = work.signature  # type: ignore[attr-defined] # Celery checks arguments by it
        return app.task(bind=True, **options)(run)

    return decorate


NOT_RETRIED = (Expired, InvalidMessageId, MessageParked, Mismatch, Reject)
"""Errors that ``autoretry_for`` leaves alone: another try would end the same way; a Reject must reach the broker."""


UNSENDABLE = (SerializationError, TypeError, ValueError)
"""Errors of a retry that no further try could send."""


def _retry(task: Task, *args: Any, **options: Any) -> Any:
    """Retry a task as ``Task.retry`` does; if it cannot be sent now, and Celery would drop it, deliver it again."""
    found = (kind.__dict__["retry"] for kind in type(task).__mro__ if "retry" in kind.__dict__)
    retry = next(one for one in found if one is not _retry)
    try:
        return retry(task, *args, **options)
    except Reject as unsent:
        if isinstance(unsent.reason, UNSENDABLE):
            raise
        raise Reject(unsent.reason, requeue=True) from unsent


@dataclass
class _Call:
    """A task under way; ``has_returned``: its body has returned, so it may have committed."""

    task: Task
    args: Any
    kwargs: Any
    has_returned: bool = False


class _TaskRunner:
    def __init__(self, body: Body, *, inbox: Inbox, engine: Engine, seconds: float | None, bind: bool) -> None:
        refuse_unfinishable(body, "inbox_task's body")
        self._body = body
        self._bind = bind
        signature = signature_of(body)
        assert signature is not None  # noqa: S101 - for the type checker: a function of Python has one
        own = list(signature.parameters.values())
        task = [] if bind else [inspect.Parameter("task", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        del own[bind : bind + 1]  # the session
        self.signature = signature.replace(parameters=[*task, *own])
        valid = ValidOptions(of="inbox_task", inbox=inbox, engine=engine, handler=self._run, transactions="message")
        context = ProcessorContext(
            subscriber_id=inbox.subscriber_id,
            source_name="celery",
            hooks=[log_event],
            wants_details=lambda: False,
            stopping=threading.Event(),
            limit=lambda: seconds,
        )
        self._fingerprint = inbox.fingerprint
        self._transactions = HandlerTransactions(valid, context)
        # A forked process must not use its parent's connections.
        worker_process_init.connect(lambda **_: engine.dispose(close=False), weak=False)

    def do(self, call: _Call, message_id: str) -> None:
        """Record a message and run the body, unless the message was processed before.

        Raises:
            MessageParked: it is a dead letter; nothing was run.
        """
        content = _stable_form(call) if self._fingerprint else b""
        delivery = Delivery(Message(message_id, content, {}, "celery"), receipt=message_id)
        try:
            self._transactions.run_single(delivery, call=call)
        except Parked:
            raise MessageParked(
                f"message {message_id} waits as a dead letter, so {call.task.name} was not run; redrive or discard it"
            ) from None

    def _run(self, session: Session, _message: Message, *, call: Any = None) -> None:
        call.has_returned = False
        # A body may change its arguments, and run again after a deadlock.
        args, kwargs = copy.deepcopy((call.args, call.kwargs))
        returned: object = self._body(*([call.task] if self._bind else []), session, *args, **kwargs)
        if returned is not None:
            raise TypeError(
                f"{call.task.name} has to return None, not {type(returned).__name__}: a duplicate could not return it "
                "again; write it to the database"
            )
        call.has_returned = True


def _stable_form(call: _Call) -> bytes:
    """Return arguments as bytes that are the same for each delivery; raise TypeError if they have no such form."""
    try:
        return json.dumps([list(call.args), call.kwargs], sort_keys=True, default=_text_of).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the arguments of {call.task.name} have no stable form, which an inbox with fingerprints needs: {error}"
        ) from error


def _text_of(value: object) -> str:
    if isinstance(value, STABLE):
        return str(value)
    raise TypeError(f"a {type(value).__name__} may be written in another way the next time")


def _send_again(task: Task, seconds: float, why: Exception) -> None:
    """Send a task again for later, as ``Task.retry`` does, but without counting it.

    Raises:
        Retry: Celery takes it as the task's end and acks the delivery.
        Reject: the task cannot be sent; the broker delivers it again.
    """
    request = task.request
    if request.called_directly or request.is_eager:
        raise why
    again = task.signature_from_request(request, countdown=seconds, retries=request.retries)
    try:
        again.apply_async()
    except Exception as error:
        raise Reject(error, requeue=True) from error
    raise Retry(exc=why, when=seconds, sig=again) from why


_log = logging.getLogger("txbox.celery")
