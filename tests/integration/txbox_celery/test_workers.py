"""Tasks in real workers of Celery, on a real Redis: killed, retried, in flight, in chains."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord
from sqlalchemy import Engine, make_url

from support.postgres.tcp_proxy import TcpProxy
from support.waiting import wait_until
from support.workers.business import Business
from txbox import Inbox
from txbox_celery import MessageParked

pytestmark = pytest.mark.timeout(240)

Start = Callable[[], "subprocess.Popen[bytes]"]


# Each test has ids of its own: a client of results remembers those that it has not asked for.


def applied_once(business: Business, *ids: str) -> None:
    assert business.applied() == dict.fromkeys(ids, 1)


@pytest.mark.parametrize("how", ["die in the body", "die after the commit"])
def test_a_task_whose_process_dies_comes_again_and_is_applied_once(
    shop: Any, start: Start, business: Business, how: str
) -> None:
    start()
    sent = shop.buy.apply_async([how], task_id=f"{how} 1")
    assert sent.get(timeout=60) is None
    after = shop.buy.apply_async([], task_id="after")
    assert after.get(timeout=60) is None
    wait_until(lambda: _is_empty(shop), "every delivery is acked", timeout=60)
    applied_once(business, sent.id, "after")


def test_a_worker_that_dies_after_the_commit_leaves_its_tasks_to_the_visibility_time_out(
    shop: Any, start: Start, business: Business
) -> None:
    first = start()
    sent = shop.buy.apply_async(["all die after the commit"], task_id="killed-1")
    assert first.wait(60) == -signal.SIGKILL
    assert business.applied() == {"killed-1": 1}
    assert not _is_empty(shop), "it was acked before"
    # A worker looks for what has timed out soon after its start, and then every 100 seconds.
    wait_until(lambda: _has_timed_out(shop), "its time is over")
    start()
    assert sent.get(timeout=120) is None  # of the second delivery: the first did not live to store it
    applied_once(business, sent.id)


def test_retries_keep_their_id(shop: Any, start: Start, business: Business) -> None:
    start()
    by_hand = shop.buy.apply_async(["retry"], task_id="retried-1")
    by_celery = shop.divide.apply_async(["retried-2"], task_id="retried-2")
    assert [by_hand.get(timeout=60), by_celery.get(timeout=60)] == [None, None]
    applied_once(business, "retried-1", "retried-2")
    assert business.recorded() == {"retried-1", "retried-2"}


def test_one_that_is_sent_twice_or_known_by_an_argument(shop: Any, start: Start, business: Business) -> None:
    start()
    for _ in range(2):
        shop.buy.apply_async([], task_id="twice-1").get(timeout=60)
        shop.by_argument.apply_async([17]).get(timeout=60)
    applied_once(business, "twice-1", "17")
    assert business.recorded() == {"twice-1", "purchase 17"}


def test_one_in_flight_comes_again_and_that_is_no_retry(
    shop: Any, start: Start, business: Business, engine: Engine, tmp_path: Path
) -> None:
    start()
    with engine.connect() as other:
        Inbox("billing").record(other, "flight-1")
        sent = shop.buy.apply_async([], task_id="flight-1")
        wait_until(lambda: (tmp_path / "worker.log").read_text().count("Retry in") > 4, "it comes again", timeout=60)
        other.rollback()
    assert sent.get(timeout=60) is None
    applied_once(business, "flight-1")
    assert business.order("body") == ["0"]  # of retries; Celery ends a task after three


def test_processes_that_were_forked_do_not_share_a_connection(
    shop: Any, start: Start, business: Business, tmp_path: Path
) -> None:
    start()
    sent = [shop.buy.apply_async(["meet"], task_id=f"meets {number}") for number in range(2)]
    assert [one.get(timeout=60) for one in sent] == [None, None]
    applied_once(business, "meets 0", "meets 1")
    assert len(set(business.order("body"))) == 2
    assert "Retry in" not in (tmp_path / "worker.log").read_text()


@pytest.mark.parametrize("lost", ["the connection", "the answer to COMMIT"])
def test_what_is_lost_on_the_way_to_the_database_is_no_retry(
    shop: Any,
    start: Start,
    business: Business,
    proxy: TcpProxy,
    schema_url: str,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
) -> None:
    through_proxy = make_url(schema_url).set(host="127.0.0.1", port=proxy.port)
    monkeypatch.setenv("SHOP_DATABASE_URL", through_proxy.render_as_string(hide_password=False))
    start()
    before = shop.buy.apply_async([], task_id=f"before {lost}")
    assert before.get(timeout=60) is None
    if lost == "the connection":
        proxy.refuse()
        proxy.cut()
    else:
        proxy.lose_next(reaches_server=True)
    sent = shop.buy.apply_async([], task_id=lost)
    wait_until(lambda: sent.state == "RETRY", "it is sent again", timeout=60, every=0.1)
    proxy.accept()
    assert sent.get(timeout=60) is None
    applied_once(business, before.id, sent.id)
    assert set(business.order("body")) == {"0"}  # of retries


def test_what_a_body_must_not_do_fails_and_leaves_nothing(shop: Any, start: Start, business: Business) -> None:
    start()
    for sent, error in (
        (shop.answer.apply_async([]), "has to return None"),
        (shop.buy.apply_async(["commit"]), "TransactionEnded"),
    ):
        failed = sent.get(timeout=60, propagate=False)
        assert error in repr(failed) + str(sent.traceback)
    assert (business.applied(), business.recorded()) == ({}, set())


def test_chains_and_chords_go_on_once(shop: Any, start: Start, business: Business) -> None:
    start()
    buy = shop.buy
    chained = chain(
        buy.si("die after the commit").set(task_id="c1"), buy.si().set(task_id="c2"), buy.si().set(task_id="c3")
    )
    assert chained.apply_async().get(timeout=60) is None
    members = [buy.si("die after the commit").set(task_id=f"g{number}") for number in range(3)]
    assert chord(members)(buy.si().set(task_id="end")).get(timeout=90) is None
    wait_until(lambda: _is_empty(shop), "every delivery is acked", timeout=60)
    applied_once(business, "c1", "c2", "c3", "g0", "g1", "g2", "end")


def test_a_dead_letter_fails_its_task_and_ends_its_chain(
    shop: Any, start: Start, business: Business, engine: Engine
) -> None:
    start()
    with engine.begin() as connection:
        Inbox("billing").record(connection, "parked-1")
        connection.exec_driver_sql("UPDATE processed_message SET dead_letter_id = 1")
    sent = chain(shop.buy.si().set(task_id="parked-1"), shop.buy.si().set(task_id="behind-1")).apply_async()
    with pytest.raises(MessageParked, match="parked-1 waits as a dead letter"):
        sent.parent.get(timeout=60)
    assert shop.buy.apply_async([], task_id="after parked-1").get(timeout=60) is None
    wait_until(lambda: _is_empty(shop), "every delivery is acked", timeout=60)
    applied_once(business, "after parked-1")


def test_a_soft_time_limit_within_the_commit_says_nothing_before_the_inbox_does(
    shop: Any, start: Start, business: Business, engine: Engine, tmp_path: Path
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql "
            "AS 'BEGIN PERFORM pg_sleep(3); RETURN NULL; END'; "
            "CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION sleep()"
        )
    start()
    sent = shop.buy.apply_async([], task_id="soft-1", soft_time_limit=1)
    assert sent.get(timeout=60) is None
    assert "Soft time limit (1s) exceeded" in (tmp_path / "worker.log").read_text()
    applied_once(business, "soft-1")


def test_a_revoked_task_is_not_applied_and_may_be_sent_again(
    shop: Any, start: Start, business: Business, tmp_path: Path
) -> None:
    start()
    sent = shop.buy.apply_async(["sleep"], task_id="revoked-1")
    wait_until((tmp_path / "revoked-1 sleeps").exists, "its body runs", timeout=60)
    sent.revoke(terminate=True, signal="SIGKILL")
    wait_until(lambda: sent.state == "REVOKED", "it is revoked", timeout=60)
    assert business.recorded() == set()
    assert shop.by_argument.apply_async([1], task_id="revoked-2").get(timeout=60) is None
    assert business.applied() == {"1": 1}


def _is_empty(shop: Any) -> bool:
    """Whether nothing waits, and nothing is in the hands of a worker."""
    with shop.app.connection_for_read() as connection:
        channel = connection.default_channel
        return not channel.client.llen(shop.app.conf.task_default_queue) and not channel.client.hlen("unacked")


def _has_timed_out(shop: Any) -> bool:
    with shop.app.connection_for_read() as connection:
        taken = connection.default_channel.client.zrange("unacked_index", 0, -1, withscores=True)
    return bool(taken) and time.time() > max(at for _, at in taken) + shop.VISIBILITY_SECONDS
