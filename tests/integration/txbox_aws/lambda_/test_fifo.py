"""A function on Lambda behind a FIFO queue: nothing overtakes what has failed."""

from typing import Any

import pytest
from sqlalchemy import Engine

from support.aws.lambda_events import Context, again, failing, of, record
from support.aws.lambda_events import event as event_of
from support.aws.lambda_functions import NOTHING, failing_for
from support.workers.business import Business, apply
from txbox import Inbox, Message
from txbox.leases import PostgresLedger
from txbox_aws.lambda_ import sqs_handler


@pytest.mark.parametrize("transactions", ["batch", "message"])
def test_fifo_stops_at_the_first_failure(pool: Engine, business: Business, transactions: Any) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("c"), transactions=transactions)
    groups = {"a": "g-1", "b": "g-2", "c": "g-1", "d": "g-2", "e": "g-3"}
    asked = event_of(*(record(name, group=group) for name, group in groups.items()))
    answer = handle(asked, Context(30))
    assert answer == failing("cde"), "those of other groups too: Lambda asks for it"
    assert business.order() == ["a", "b"]
    assert business.failing() == {"c": 1}
    well = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=apply)
    assert well(again(asked, answer), Context(30)) == NOTHING
    assert business.order() == list("abcde")


def test_fifo_goes_on_after_a_dead_letter(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("b"), max_attempts=1)
    assert handle(of("abc", group="g"), Context(30)) == NOTHING
    assert business.order() == ["a", "c"]
    assert business.letters() == {"b": "failed"}


def test_fifo_waits_behind_a_dead_letter_if_it_keeps_order(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("b"), max_attempts=1, ordered=True)
    assert handle(of("abc", group="g"), Context(30)) == NOTHING
    assert business.order() == ["a"]
    assert business.letters() == {"b": "failed", "c": "behind"}
    assert handle(of("d", group="other"), Context(30)) == NOTHING
    assert business.order() == ["a", "d"], "another group is not held"


def test_fifo_stops_as_a_whole_at_a_failure_also_if_it_keeps_order(pool: Engine, business: Business) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("b"), ordered=True)
    asked = event_of(*(record(name, group=group) for name, group in {"a": "g-1", "b": "g-1", "c": "g-2"}.items()))
    assert handle(asked, Context(30)) == failing("bc")
    assert business.order() == ["a"]


def test_fifo_with_a_ledger_stops_at_the_first_failure(pool: Engine, business: Business) -> None:
    seen = []

    def mail(message: Message) -> None:
        seen.append(message.id)
        if message.id == "b":
            raise ValueError("no")

    handle = sqs_handler(ledger=PostgresLedger("billing", engine=pool), handler=mail)
    assert handle(of("abcd", group="g"), Context(30)) == failing("bcd")
    assert seen == ["a", "b"]
