"""Redrives of what workers took from the outbox: they come back by it, in their order."""

import pytest
from sqlalchemy import Engine

from support.txbox.outbox import publish
from support.waiting import wait_until
from support.workers.memory_worker import at_work
from txbox import DeadLetters, Inbox, Message, Outgoing
from txbox.dead_letters import LetterFilter, LetterOperations, OperationKind
from txbox_workers.postgres import PostgresWorker


@pytest.mark.parametrize("fingerprint", [False, True])
def test_letters_of_a_key_run_again_in_the_order_in_which_they_were_published(
    engine: Engine, fingerprint: bool
) -> None:
    ran: list[str] = []
    repaired = False

    def handle(_: object, message: Message) -> None:
        if message.body == b"0" and not repaired:
            raise ValueError("no stock")
        ran.append(message.body.decode())

    letters, operations = DeadLetters(engine), LetterOperations(engine)
    publish(engine, *(Outgoing("inbox:billing", str(number), key="ann") for number in range(4)))
    inbox = Inbox("billing", fingerprint=fingerprint)
    worker = PostgresWorker(inbox=inbox, engine=engine, handler=handle, ordered=True, max_attempts=1)
    with at_work(worker):
        wait_until(lambda: len(letters.list()) == 4, "one failed, three behind it")
        publish(engine, Outgoing("inbox:billing", "4", key="ann"))
        wait_until(lambda: len(letters.list()) == 5)
        repaired = True
        operation = operations.select(LetterFilter(), OperationKind.REDRIVE, by="kim")
        assert operation is not None
        done = operations.carry_out(operation.operation_id)
        assert done.outcomes == {"redriven": 5}
        wait_until(lambda: len(ran) == 5)
    assert ran == ["0", "1", "2", "3", "4"]
    assert letters.list() == []
