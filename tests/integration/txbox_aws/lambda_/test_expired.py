"""What is too old to judge, in a function on Lambda: it is parked, not run, and does not come again."""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine

from support.aws.lambda_events import Context, event, failing, of, record
from support.aws.lambda_functions import NOTHING, failing_for
from support.txbox.horizon import forget, move_horizon
from support.workers.business import Business, apply, once
from txbox import DeadLetters, Inbox, Message, Outcome
from txbox.instrumentation import Settled
from txbox.leases import PostgresLedger
from txbox_aws.lambda_ import sqs_handler


def young(message_id: str, **options: Any) -> dict[str, Any]:
    return record(message_id, sent_at=datetime.now(UTC), **options)


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_a_message_that_was_forgotten_and_comes_again_is_parked_and_not_run(
    pool: Engine, business: Business, transactions: Any
) -> None:
    heard: list[Any] = []
    handle = sqs_handler(
        inbox=Inbox("billing"),
        engine=pool,
        handler=failing_for("c"),
        transactions=transactions,
        hooks=[heard.append],
    )
    assert handle(of("ab"), Context(30)) == NOTHING
    forget(pool, "a")
    heard.clear()
    assert handle(event(record("a", receives=2), record("b"), young("c"), young("d")), Context(30)) == failing("c")
    settled = {it.message_id: (it.outcome, it.acked) for it in heard if isinstance(it, Settled)}
    assert settled == {
        "a": (Outcome.EXPIRED, True),
        "b": (Outcome.DUPLICATE, True),
        "c": (Outcome.FAILED, False),
        "d": (Outcome.PROCESSED, True),
    }
    assert business.applied() == once("abd")
    assert business.letters() == {"a": "expired"}
    assert business.failing() == {"c": 1}
    assert handle(of("a"), Context(30)) == NOTHING, "it is parked once"
    assert len(DeadLetters(pool).list()) == 1


def test_fifo_goes_on_behind_it(pool: Engine, business: Business) -> None:
    move_horizon(pool)
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply)
    asked = event(young("a", group="g"), record("b", group="g"), young("c", group="g"))
    assert handle(asked, Context(30)) == NOTHING
    assert business.order() == ["a", "c"]
    assert business.letters() == {"b": "expired"}


def test_fifo_waits_behind_it_if_it_keeps_order_and_other_groups_go_on(pool: Engine, business: Business) -> None:
    move_horizon(pool)
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply, ordered=True)
    asked = event(young("a", group="g"), record("b", group="g"), young("c", group="g"), young("x", group="other"))
    assert handle(asked, Context(30)) == NOTHING
    assert business.order() == ["a", "x"]
    assert business.letters() == {"b": "expired", "c": "behind"}


@pytest.mark.parametrize("group", [None, "g"], ids=["standard", "fifo"])
def test_a_ledger_alone_parks_it_where_there_are_dead_letters(
    pool: Engine, business: Business, group: str | None
) -> None:
    move_horizon(pool)
    seen: list[str] = []
    ledger = PostgresLedger("billing", engine=pool)
    asked = event(young("a", group=group), record("b", group=group), young("c", group=group))

    def mail(message: Message) -> None:
        seen.append(message.id)

    alone = sqs_handler(ledger=ledger, handler=mail)
    assert alone(asked, Context(30)) == failing("bc" if group else "b"), "it comes again, until its queue forgets it"
    with_letters = sqs_handler(ledger=ledger, handler=mail, dead_letters=DeadLetters(pool))
    assert with_letters(asked, Context(30)) == NOTHING
    assert seen == ["a", "c"]
    assert business.letters() == {"b": "expired"}


def test_a_ledger_beside_an_inbox_leaves_it_to_the_inbox(pool: Engine, business: Business) -> None:
    move_horizon(pool)
    ledger = PostgresLedger("billing", engine=pool)
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply, ledger=ledger)
    assert handle(event(record("a"), young("b")), Context(30)) == NOTHING
    assert handle(of("a"), Context(30)) == NOTHING
    assert business.applied() == once("b")
    assert business.letters() == {"a": "expired"}
