"""Each transaction mode beside order, locks, redrives, the driver's cursors and Postgres as the queue."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from support.waiting import wait_until
from support.workers.business import ADD, Business, apply, once
from support.workers.memory_worker import at_work, make, numbered
from support.workers.ordered import failing, in_group, ordered, outcomes, redrive, waiting, with_key
from txbox import Inbox, Message, Outbox, Outcome, Outgoing
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox_workers.delivery import Delivery
from txbox_workers.memory_source import MemorySource
from txbox_workers.postgres import PostgresWorker
from txbox_workers.processing import deadlocks
from txbox_workers.processing.transaction_modes import ModeSelector, TransactionMode

APPLY = "INSERT INTO effect (message_id, body) VALUES (%s, %s)"


@pytest.fixture(params=list(TransactionMode), ids=lambda mode: mode.name.lower(), autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransactionMode:
    """Workers made in the test keep this mode."""
    kept: TransactionMode = request.param

    class Fixed(ModeSelector):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._mode = kept

        def _choose(self) -> None:
            """Stay as it is."""

    monkeypatch.setattr(deadlocks, "ModeSelector", Fixed)
    return kept


@pytest.mark.parametrize("options", [{}, {"locks": lambda message: -int(message.id[-1])}], ids=["", "locks"])
@pytest.mark.parametrize("make_delivery", [in_group, with_key])
def test_a_key_keeps_its_order_and_what_fails_holds_what_follows(
    leveled: Engine, business: Business, make_delivery: Callable[..., Delivery], options: dict[str, Any]
) -> None:
    """Its messages are in both halves, and locks alone would turn them round."""
    batch = [make_delivery("m1"), make_delivery("m2"), make_delivery("n1", "n"), make_delivery("m3")]
    found = outcomes(ordered(leveled, failing("m2"), **options), *batch)
    assert found == {
        "m1": Outcome.PROCESSED,
        "m2": Outcome.DEAD,
        "n1": Outcome.PROCESSED,
        "m3": Outcome.DEAD,
    }
    assert waiting(leveled) == {"m2": "failed", "m3": "behind"}
    worker = ordered(leveled, **options)
    redrive(leveled, lambda letter: outcomes(worker, make_delivery(letter.message_id, receive_count=2)))
    again = outcomes(worker, make_delivery("m2", receive_count=3), make_delivery("m3", receive_count=3))
    assert set(again.values()) <= {Outcome.PROCESSED, Outcome.DUPLICATE}
    assert [one for one in business.order() if one.startswith("m")] == ["m1", "m2", "m3"]
    assert business.applied() == once(["m1", "m2", "m3", "n1"])


@pytest.mark.parametrize("make_delivery", [in_group, with_key])
def test_what_follows_a_failure_in_its_key_is_handed_back(
    engine: Engine, business: Business, make_delivery: Callable[..., Delivery]
) -> None:
    batch = [make_delivery("m1"), make_delivery("m2"), make_delivery("n1", "n"), make_delivery("m3")]
    assert outcomes(ordered(engine, failing("m2"), max_attempts=3), *batch) == {
        "m1": Outcome.PROCESSED,
        "m2": Outcome.FAILED,
        "n1": Outcome.PROCESSED,
        "m3": Outcome.IN_FLIGHT,
    }
    assert business.applied() == once(["m1", "n1"])


def test_cursors_over_the_outbox_apply_each_message_once_in_the_order_of_its_key(
    engine: Engine, business: Business
) -> None:
    failed: list[str] = []

    def by_cursor(cursor: psycopg.Cursor[Any], message: Message) -> None:
        cursor.execute(APPLY, (message.id, message.text))
        if message.id.endswith("5") and message.id not in failed:
            failed.append(message.id)
            raise ValueError("once")

    ids = [f"k{number % 4}-{number:02}" for number in range(40)]
    with engine.begin() as connection:
        Outbox().publish_many(
            connection, [Outgoing("inbox:billing", b"{}", key=id_[:2], message_id=id_) for id_ in ids]
        )
    worker = PostgresWorker(inbox=Inbox("billing"), engine=engine, handler=by_cursor, ordered=True, threads=2)
    with at_work(worker):
        wait_until(lambda: business.rows("SELECT count(*) FROM outbox_message") == [0], "all are settled")
    assert business.applied() == once(ids)
    assert failed, "some have failed, and came again"
    for key in ("k0", "k1", "k2", "k3"):
        mine = [id_ for id_ in business.order() if id_.startswith(key)]
        assert mine == sorted(mine)


def test_rotations_beside_two_workers_that_meet_in_every_row(
    engine: Engine, leveled: Engine, business: Business
) -> None:
    """Each message comes to both. In turn, a transaction waits with its records written, which a rotation waits for."""

    def handle(session: Session, message: Message) -> None:
        for account in (1, 2):
            session.execute(ADD, {"account": account, "amount": 1})
        apply(session, message)

    sent = numbered(100)
    sources = [MemorySource(sent, batch_size=4), MemorySource(sent[::-1], batch_size=4)]
    workers = [make(source, leveled, handle, threads=2, max_attempts=None) for source in sources]
    assert InboxConversion(engine).forward()
    generations = Generations(engine)
    with at_work(*workers):
        rotated = [generations.rotate() for _ in range(2)]
        assert all(source.wait_until_empty(60) for source in sources)
    assert any(rotated)
    assert business.applied() == once(message.id for message in sent)
    assert (business.balance(1), business.balance(2)) == (100, 100)
