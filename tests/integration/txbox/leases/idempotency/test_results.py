"""Results of idempotent handlers: how they are kept."""

from typing import Any

import pytest

from support.txbox.idempotent_handlers import MESSAGE
from txbox import Message, ResultNotStored
from txbox.leases import PostgresLedger, idempotent


def test_a_result_of_json_comes_back_as_it_was(ledger: PostgresLedger) -> None:
    results: list[Any] = [None, True, 0, "größe", [1, None, {"a": 1.5}], {}]
    handler = idempotent(lambda message: results[int(message.id)], ledger=ledger)
    for number, result in enumerate(results):
        assert [handler(Message(str(number), b"")) for _ in range(3)] == [result] * 3


def test_a_result_may_be_encoded_in_any_way(ledger: PostgresLedger) -> None:
    handler = idempotent(
        lambda message: {1, 2},
        ledger=ledger,
        encode=lambda result: ",".join(map(str, sorted(result))),
        decode=lambda encoded: {int(number) for number in encoded.decode().split(",")},
    )
    assert [handler(MESSAGE) for _ in range(2)] == [{1, 2}] * 2
    assert ledger.acquire("m").result == b"1,2"


def test_a_result_need_not_be_kept(ledger: PostgresLedger) -> None:
    handler = idempotent(lambda message: object(), ledger=ledger, keep_result=False)
    assert handler(MESSAGE) is not None
    assert handler(MESSAGE) is None


def test_a_result_that_cannot_be_kept_is_told_and_the_message_is_completed(ledger: PostgresLedger) -> None:
    results: list[Any] = [object(), {1}, float("nan"), b"bytes", "\ud800"]
    runs = []

    def handler(message: Message) -> Any:
        runs.append(message.id)
        return results[int(message.id)]

    decorated = idempotent(handler, ledger=ledger)
    messages = [Message(str(number), b"") for number in range(len(results))]
    for message in messages:
        with pytest.raises(ResultNotStored, match=f"mailing has completed {message.id}") as caught:
            decorated(message)
        assert caught.value.message_id == message.id
        assert caught.value.__cause__ is not None
        assert decorated(message) is None
    assert runs == [message.id for message in messages]
