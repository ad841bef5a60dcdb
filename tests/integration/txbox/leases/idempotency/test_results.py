"""Results of idempotent handlers: how they are kept."""

from typing import Any

import pytest

from support.idempotent_handlers import MESSAGE
from txbox import Message, ResultNotStored
from txbox.leases import PostgresLedger, idempotent


@pytest.mark.parametrize("result", [None, True, 0, "größe", [1, None, {"a": 1.5}], {}])
def test_a_result_of_json_comes_back_as_it_was(ledger: PostgresLedger, result: Any) -> None:
    handler = idempotent(lambda message: result, ledger=ledger)
    assert [handler(MESSAGE) for _ in range(3)] == [result] * 3


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


@pytest.mark.parametrize("result", [object(), {1}, float("nan"), b"bytes", "\ud800"], ids=range(5))
def test_a_result_that_cannot_be_kept_is_told_and_the_message_is_completed(ledger: PostgresLedger, result: Any) -> None:
    runs = []

    def handler(message: Message) -> Any:
        runs.append(message)
        return result

    decorated = idempotent(handler, ledger=ledger)
    with pytest.raises(ResultNotStored, match="mailing has completed m") as caught:
        decorated(MESSAGE)
    assert caught.value.message_id == "m"
    assert caught.value.__cause__ is not None
    assert decorated(MESSAGE) is None
    assert runs == [MESSAGE]
