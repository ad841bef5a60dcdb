"""A function on Lambda with a ledger, in Postgres or in DynamoDB."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from sqlalchemy import Engine

from support.aws.lambda_events import NOTHING, Context, again, failing, failing_for, of
from support.txbox.leases import dynamodb_store
from support.workers.business import Business, once
from txbox import Inbox, Message, TxboxError
from txbox.leases import Ledger, PostgresLedger
from txbox_aws.lambda_ import sqs_handler
from txbox_local import LocalAws


@pytest.fixture(params=["postgres", "dynamodb"])
def ledger(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Ledger]:
    if request.param == "postgres":
        yield PostgresLedger("billing", engine=engine)
    else:
        request.getfixturevalue("aws")
        client = boto3.client("dynamodb")
        yield dynamodb_store(client).ledger("billing")
        client.close()


def test_a_ledger_alone(ledger: Ledger) -> None:
    seen = []

    def mail(message: Message, *, lease: Any) -> None:
        seen.append((message.id, lease.attempt))
        if message.id == "b" and lease.attempt == 1:
            raise ConnectionError("no answer")

    handle = sqs_handler(ledger=ledger, handler=mail)
    asked = of("abc")
    answer = handle(asked, Context(30))
    assert answer == failing("b")
    assert handle(again(asked, answer), Context(30)) == NOTHING
    assert handle(asked, Context(30)) == NOTHING
    assert seen == [("a", 1), ("b", 1), ("c", 1), ("b", 2)]


def test_a_ledger_beside_an_inbox(pool: Engine, business: Business, ledger: Ledger) -> None:
    handle = sqs_handler(inbox=Inbox("billing"), engine=pool, handler=failing_for("b"), ledger=ledger)
    assert handle(of("abc"), Context(30)) == failing("b")
    assert business.applied() == once("ac")
    assert handle(of("abc"), Context(30)) == failing("b")
    assert business.applied() == once("ac")


def test_a_ledger_that_is_away_fails_the_function_as_a_whole(aws: LocalAws) -> None:
    from txbox_aws.dynamodb import DynamoDBLedger

    client = boto3.client("dynamodb")
    handle = sqs_handler(
        ledger=DynamoDBLedger("billing", table="no_such_table", client=client), handler=lambda message: None
    )
    with pytest.raises(TxboxError, match=r"all 2 messages of the event come again.*no_such_table"):
        handle(of("ab"), Context(30))
    client.close()
