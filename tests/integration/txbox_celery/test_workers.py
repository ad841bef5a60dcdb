"""Tasks in real workers of Celery, on a real broker: killed, retried, in flight, in chains."""

import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord
from sqlalchemy import Engine, make_url
from sqlalchemy.schema import DropSchema

from support.celery_shop.workers import Workers, has_timed_out, is_empty
from support.postgres.tables import make_tables
from support.postgres.tcp_proxy import TcpProxy
from support.waiting import wait_until
from support.workers.business import Business
from txbox import Inbox
from txbox_celery import MessageParked

pytestmark = pytest.mark.timeout(240)

SETTLED_SECONDS = 5.0
"""After a test that went well, what it sent is acked sooner."""

Start = Callable[..., "subprocess.Popen[bytes]"]
Log = Callable[[], str]


@pytest.fixture(scope="module")
def schema_url(database_url: str, admin_engine: Engine) -> Iterator[str]:
    """One schema for all tests here: a worker takes a second to start, so most share one, which keeps its database."""
    name = f"celery_{uuid.uuid4().hex[:12]}"
    make_tables(admin_engine, name)
    yield (
        make_url(database_url)
        .update_query_dict({"options": f"-csearch_path={name}"})
        .render_as_string(hide_password=False)
    )
    with admin_engine.connect() as connection:
        connection.execute(DropSchema(name, cascade=True))


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tasks note what they have done, and workers log."""
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def shop(redis_socket: str, schema_url: str, notes: Path) -> Iterator[Any]:
    """The application."""
    variables = {
        "SHOP_REDIS_URL": f"redis+socket://{redis_socket}",
        "SHOP_RESULTS_URL": f"redis+socket://{redis_socket}",
        "SHOP_DATABASE_URL": schema_url,
        "SHOP_NOTES": str(notes),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        module = import_module("support.celery_shop.app")
        yield module
        module.ENGINE.dispose()


@pytest.fixture(scope="module")
def workers(shop: Any, notes: Path) -> Iterator[Workers]:
    workers = Workers(notes / "worker.log")
    yield workers
    workers.kill()


@pytest.fixture
def worker(shop: Any, workers: Workers, business: Business) -> Iterator[None]:
    """A worker, that of the test before where it lives, for tests that leave it alive."""
    if not workers.running():
        _flush(shop)
        workers.start()
    yield
    try:
        wait_until(lambda: is_empty(shop.app), timeout=SETTLED_SECONDS)
    except AssertionError:
        workers.kill()  # the next test must not meet what this one has left


@pytest.fixture
def start(shop: Any, workers: Workers, business: Business) -> Iterator[Start]:
    """Start workers, on empty queues, of which no other test hears."""
    workers.kill()
    _flush(shop)
    yield workers.start
    workers.kill()


@pytest.fixture
def log(notes: Path) -> Log:
    """What workers have logged in this test."""
    path = notes / "worker.log"
    begin = path.stat().st_size if path.exists() else 0
    return lambda: path.read_bytes()[begin:].decode()


@pytest.fixture
def business(business: Business) -> Business:
    """The tables, emptied."""
    with business.engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE effect, processed_message")
    return business


# Each test has ids of its own: a client of results remembers those that it has not asked for.


def applied_once(business: Business, *ids: str) -> None:
    assert business.applied() == dict.fromkeys(ids, 1)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["die in the body", "die after the commit"])
def test_a_task_whose_process_dies_comes_again_and_is_applied_once(shop: Any, business: Business, how: str) -> None:
    sent = shop.buy.apply_async([how], task_id=f"{how} 1")
    assert sent.get(timeout=60) is None
    after = shop.buy.apply_async([], task_id=f"{how} 2")
    assert after.get(timeout=60) is None
    wait_until(lambda: is_empty(shop.app), "every delivery is acked", timeout=60)
    applied_once(business, sent.id, after.id)


@pytest.mark.usefixtures("worker")
def test_retries_keep_their_id(shop: Any, business: Business) -> None:
    by_hand = shop.buy.apply_async(["retry"], task_id="retried-1")
    by_celery = shop.divide.apply_async(["retried-2"], task_id="retried-2")
    assert [by_hand.get(timeout=60), by_celery.get(timeout=60)] == [None, None]
    applied_once(business, "retried-1", "retried-2")
    assert business.recorded() == {"retried-1", "retried-2"}


@pytest.mark.usefixtures("worker")
def test_one_that_is_sent_twice_or_known_by_an_argument(shop: Any, business: Business) -> None:
    for _ in range(2):
        shop.buy.apply_async([], task_id="twice-1").get(timeout=60)
        shop.by_argument.apply_async([17]).get(timeout=60)
    applied_once(business, "twice-1", "17")
    assert business.recorded() == {"twice-1", "purchase 17"}


@pytest.mark.usefixtures("worker")
def test_one_in_flight_comes_again_and_that_is_no_retry(
    shop: Any, business: Business, engine: Engine, log: Log
) -> None:
    with engine.connect() as other:
        Inbox("billing").record(other, "flight-1")
        sent = shop.buy.apply_async([], task_id="flight-1")
        wait_until(lambda: log().count("Retry in") > 4, "it comes again", timeout=60)
        other.rollback()
    assert sent.get(timeout=60) is None
    applied_once(business, "flight-1")
    assert business.order("body") == ["0"]  # of retries; Celery ends a task after three


@pytest.mark.usefixtures("worker")
def test_what_a_body_must_not_do_fails_and_leaves_nothing(shop: Any, business: Business) -> None:
    for sent, error in (
        (shop.answer.apply_async([]), "has to return None"),
        (shop.buy.apply_async(["commit"]), "TransactionEnded"),
    ):
        failed = sent.get(timeout=60, propagate=False)
        assert error in repr(failed) + str(sent.traceback)
    assert (business.applied(), business.recorded()) == ({}, set())


@pytest.mark.usefixtures("worker")
def test_chains_and_chords_go_on_once(shop: Any, business: Business) -> None:
    buy = shop.buy
    chained = chain(
        buy.si("die after the commit").set(task_id="c1"), buy.si().set(task_id="c2"), buy.si().set(task_id="c3")
    )
    assert chained.apply_async().get(timeout=60) is None
    members = [buy.si("die after the commit").set(task_id=f"g{number}") for number in range(3)]
    assert chord(members)(buy.si().set(task_id="end")).get(timeout=90) is None
    wait_until(lambda: is_empty(shop.app), "every delivery is acked", timeout=60)
    applied_once(business, "c1", "c2", "c3", "g0", "g1", "g2", "end")


@pytest.mark.usefixtures("worker")
def test_a_dead_letter_fails_its_task_and_ends_its_chain(shop: Any, business: Business, engine: Engine) -> None:
    with engine.begin() as connection:
        Inbox("billing").record(connection, "parked-1")
        connection.exec_driver_sql("UPDATE processed_message SET dead_letter_id = 1")
    sent = chain(shop.buy.si().set(task_id="parked-1"), shop.buy.si().set(task_id="behind-1")).apply_async()
    with pytest.raises(MessageParked, match="parked-1 waits as a dead letter"):
        sent.parent.get(timeout=60)
    assert shop.buy.apply_async([], task_id="after parked-1").get(timeout=60) is None
    wait_until(lambda: is_empty(shop.app), "every delivery is acked", timeout=60)
    applied_once(business, "after parked-1")


@pytest.mark.usefixtures("worker")
def test_a_soft_time_limit_within_the_commit_says_nothing_before_the_inbox_does(
    shop: Any, business: Business, engine: Engine, log: Log
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql "
            "AS 'BEGIN PERFORM pg_sleep(3); RETURN NULL; END'; "
            "CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW WHEN (NEW.message_id = 'soft-1') EXECUTE FUNCTION sleep()"
        )
    sent = shop.buy.apply_async([], task_id="soft-1", soft_time_limit=1)
    assert sent.get(timeout=60) is None
    assert "Soft time limit (1s) exceeded" in log()
    applied_once(business, "soft-1")


@pytest.mark.usefixtures("worker")
def test_a_revoked_task_is_not_applied_and_may_be_sent_again(shop: Any, business: Business, notes: Path) -> None:
    sent = shop.buy.apply_async(["sleep"], task_id="revoked-1")
    wait_until((notes / "revoked-1 sleeps").exists, "its body runs", timeout=60)
    sent.revoke(terminate=True, signal="SIGKILL")
    wait_until(lambda: sent.state == "REVOKED", "it is revoked", timeout=60)
    assert business.recorded() == set()
    assert shop.by_argument.apply_async([1], task_id="revoked-2").get(timeout=60) is None
    assert business.applied() == {"1": 1}


@pytest.mark.usefixtures("worker")
def test_processes_that_were_forked_do_not_share_a_connection(shop: Any, business: Business, log: Log) -> None:
    sent = [shop.buy.apply_async(["meet"], task_id=f"meets {number}") for number in range(2)]
    assert [one.get(timeout=60) for one in sent] == [None, None]
    applied_once(business, "meets 0", "meets 1")
    assert len(set(business.order("body"))) == 2
    assert "Retry in" not in log()


def test_a_worker_that_dies_after_the_commit_leaves_its_tasks_to_the_visibility_time_out(
    shop: Any, start: Start, business: Business, log: Log
) -> None:
    first = start()
    sent = shop.buy.apply_async(["all die after the commit"], task_id="killed-1")
    try:
        assert first.wait(60) == -signal.SIGKILL
    except subprocess.TimeoutExpired:
        pytest.fail(f"the worker lives; the broker has {_state(shop)}; it logged: {log()}")
    assert business.applied() == {"killed-1": 1}
    assert not is_empty(shop.app), "it was acked before"
    # A worker looks for what has timed out soon after its start, and then every 100 seconds.
    wait_until(lambda: has_timed_out(shop.app), "its time is over")
    start()
    assert sent.get(timeout=120) is None  # of the second delivery: the first did not live to store it
    applied_once(business, sent.id)


def test_what_is_lost_on_the_way_to_the_database_is_no_retry(
    shop: Any, start: Start, business: Business, proxy: TcpProxy, schema_url: str
) -> None:
    through_proxy = make_url(schema_url).set(host="127.0.0.1", port=proxy.port)
    start(SHOP_DATABASE_URL=through_proxy.render_as_string(hide_password=False))
    assert shop.buy.apply_async([], task_id="before").get(timeout=60) is None
    for lost in ("the connection", "the answer to COMMIT"):
        if lost == "the connection":
            proxy.refuse()
            proxy.cut()
        else:
            proxy.lose_next(reaches_server=True)
        sent = shop.buy.apply_async([], task_id=lost)
        wait_until(lambda: sent.state == "RETRY", "it is sent again", timeout=60, every=0.1)  # noqa: B023 - called at once
        proxy.accept()
        assert sent.get(timeout=60) is None
    applied_once(business, "before", "the connection", "the answer to COMMIT")
    assert set(business.order("body")) == {"0"}  # of retries


def _flush(shop: Any) -> None:
    """Empty the broker, of which no worker is alive."""
    with shop.app.connection_for_write() as connection:
        client = connection.default_channel.client
        for other in client.client_list():
            if "b" in other["flags"]:  # it waits for a worker that is dead, and would take the next message with it
                client.client_kill_filter(_id=other["id"])
        client.flushall()


def _state(shop: Any) -> str:
    with shop.app.connection_for_read() as connection:
        client = connection.default_channel.client
        clients = [{key: one[key] for key in ("id", "age", "idle", "flags", "cmd")} for one in client.client_list()]
        calls = {command: of["calls"] for command, of in client.info("commandstats").items()}
        return f"{client.llen('celery')} messages, {client.hlen('unacked')} in hands, {clients}, {calls}"
