"""What ``idempotent`` does with handlers of every kind, whatever they return or raise."""

import asyncio
import functools
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url

from support.leases import acquired, postgres_store
from support.tcp_proxy import TcpProxy
from support.waiting import wait_until
from txbox import (
    EffectUnknown,
    InFlight,
    InvalidConfiguration,
    LeaseLost,
    LedgerError,
    Message,
    Mismatch,
    ResultNotStored,
)
from txbox.idempotency import idempotent
from txbox.ledgers import Acquisition, Lease, LeaseState, PostgresLedger, leased
from txbox.ledgers.lease import LEASE_SECONDS

MESSAGE = Message("m", b'{"to": "ann"}')
LONG = 600.0


@pytest.fixture
def ledger(engine: Engine) -> PostgresLedger:
    return PostgresLedger(engine, "mailing")


@pytest.fixture
def expire(engine: Engine, schema_url: str) -> Callable[[str], None]:
    return postgres_store(engine, schema_url).expire


@pytest.fixture
def proxy(schema_url: str) -> Iterator[TcpProxy]:
    """A proxy in front of Postgres."""
    url = make_url(schema_url)
    with TcpProxy(url.host or "127.0.0.1", url.port or 5432) as proxy:
        yield proxy


@pytest.fixture
def remote(schema_url: str, proxy: TcpProxy) -> Iterator[PostgresLedger]:
    """A ledger behind the proxy."""
    engine = create_engine(make_url(schema_url).set(host="127.0.0.1", port=proxy.port), pool_size=5)
    yield PostgresLedger(engine, "mailing")
    engine.dispose()


def kinds(ledger: PostgresLedger, ran: list[Any]) -> dict[str, Callable[..., Any]]:
    """Handlers of every kind, already idempotent, for one message each."""
    once = idempotent(ledger=ledger)

    @once
    def function(message: Message, greeting: str = "hello", *, sign: bool = True) -> dict[str, Any]:
        ran.append((message, greeting, sign))
        return {"sent": greeting}

    @once
    async def coroutine_function(message: Message, greeting: str = "hello", *, sign: bool = True) -> dict[str, Any]:
        await asyncio.sleep(0)
        return function.__wrapped__(message, greeting, sign=sign)  # type: ignore[attr-defined, no-any-return]

    plain: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]
    plain_async: Callable[..., Any] = coroutine_function.__wrapped__  # type: ignore[attr-defined]

    class Object:
        def __call__(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

    class AsyncObject:
        async def __call__(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

    class Owner:
        @once
        def method(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            assert isinstance(self, Owner)
            return plain(message, greeting, sign=sign)

        @once
        async def async_method(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

        @classmethod
        @once
        def class_method(cls, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            assert cls is Owner
            return plain(message, greeting, sign=sign)

        @staticmethod
        @once
        def static_method(message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

        def bare(self, message: Message, greeting: str = "hello", *, sign: bool = True) -> Any:
            return plain(message, greeting, sign=sign)

    return {
        "function": function,
        "coroutine function": coroutine_function,
        "called with the handler": idempotent(plain, ledger=ledger),
        "object": once(Object()),
        "async object": once(AsyncObject()),
        "method": Owner().method,
        "async method": Owner().async_method,
        "class method": Owner.class_method,
        "static method": Owner.static_method,
        "bound method": once(Owner().bare),
        "partial": once(functools.partial(plain, sign=True)),
        "partial of a coroutine function": once(functools.partial(plain_async, sign=True)),
        "lambda": once(lambda message, greeting="hello", sign=True: plain(message, greeting, sign=sign)),
    }


KINDS = list(kinds(PostgresLedger(create_engine("postgresql+psycopg://"), "nobody"), []))


def result_of(answer: Any) -> Any:
    async def awaited(answer: Awaitable[Any]) -> Any:
        return await answer

    return asyncio.run(awaited(answer)) if asyncio.iscoroutine(answer) else answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_of_any_kind_runs_once_and_its_result_is_kept(ledger: PostgresLedger, kind: str) -> None:
    ran: list[Any] = []
    handler = kinds(ledger, ran)[kind]
    for _ in range(3):
        assert result_of(handler(MESSAGE, greeting="hi")) == {"sent": "hi"}
    assert result_of(handler(message=Message("n", b""), sign=True)) == {"sent": "hello"}
    assert ran == [(MESSAGE, "hi", True), (Message("n", b""), "hello", True)]


def test_a_decorated_handler_is_still_itself(ledger: PostgresLedger) -> None:
    @idempotent(ledger=ledger)
    def send_mail(message: Message) -> None:
        """Send it."""

    assert (send_mail.__name__, send_mail.__doc__) == ("send_mail", "Send it.")
    assert asyncio.iscoroutinefunction(kinds(ledger, [])["async method"])


# --- results ----------------------------------------------------------------------------------------------------------


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


# --- failures ---------------------------------------------------------------------------------------------------------

FAILURES = [ValueError("no"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), GeneratorExit()]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("failure", FAILURES, ids=repr)
def test_a_handler_that_fails_leaves_the_message_free_and_its_error_goes_on(
    ledger: PostgresLedger, failure: BaseException, is_async: bool
) -> None:
    leases: list[Lease] = []

    def handler(message: Message, lease: Lease) -> str:
        leases.append(lease)
        if len(leases) == 1:
            raise failure
        return "sent"

    async def handler_async(message: Message, lease: Lease) -> str:
        return handler(message, lease)

    decorated: Any = idempotent(handler_async if is_async else handler, ledger=ledger)

    def call() -> Any:
        if not is_async:
            return decorated(MESSAGE)
        # By hand: asyncio.run has opinions of its own on most of these.
        coroutine = decorated(MESSAGE)
        loop = asyncio.new_event_loop()
        try:
            task = loop.create_task(coroutine)
            loop.run_until_complete(asyncio.wait([task]))
            return task.result()
        except (KeyboardInterrupt, SystemExit):
            assert task.exception() is failure
            raise
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    with pytest.raises(type(failure)):
        call()
    assert call() == "sent"
    # One that was interrupted may have come anywhere.
    unknown = 0 if isinstance(failure, Exception) else 1
    assert [(lease.attempt, lease.unknown_attempts) for lease in leases] == [(1, 0), (2, unknown)]
    assert leases[1].fence > leases[0].fence


def test_a_handler_that_cannot_know_says_so_and_the_next_attempt_is_told(ledger: PostgresLedger) -> None:
    seen = []

    @idempotent(ledger=ledger)
    def mail(message: Message, lease: Lease | None = None) -> None:
        assert lease is not None
        seen.append((lease.attempt, lease.unknown_attempts))
        if lease.attempt == 1:
            raise EffectUnknown("the server hung up")
        if lease.attempt == 2:
            raise ValueError("refused")

    for expected in (EffectUnknown, ValueError):
        with pytest.raises(expected):
            mail(Message("m", b""))
    mail(Message("m", b""))
    assert seen == [(1, 0), (2, 1), (3, 1)]


def test_a_stop_iteration_of_a_handler_is_no_end_of_ours(ledger: PostgresLedger) -> None:
    def handler(message: Message) -> None:
        next(iter(()))

    with pytest.raises((StopIteration, RuntimeError)):
        idempotent(handler, ledger=ledger)(MESSAGE)
    assert acquired(ledger, "m").unknown_attempts == 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_store_that_is_away_at_the_release_does_not_hide_the_handlers_error(
    ledger: PostgresLedger, remote: PostgresLedger, proxy: TcpProxy, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(message: Message) -> None:
        proxy.refuse()
        proxy.cut()
        raise ZeroDivisionError

    async def handler_async(message: Message) -> None:
        handler(message)

    with pytest.raises(ZeroDivisionError):
        result_of(idempotent(handler_async if is_async else handler, ledger=remote)(MESSAGE))
    assert "could not be released" in caplog.text
    assert ledger.acquire("m").state is LeaseState.IN_FLIGHT, "until its lease has run out"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_store_that_is_away_for_a_while_when_the_work_is_done_hears_of_it_later(
    ledger: PostgresLedger, remote: PostgresLedger, proxy: TcpProxy, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []

    def handler(message: Message) -> str:
        runs.append(1)
        proxy.refuse()
        proxy.cut()
        back = threading.Thread(target=come_back)
        back.start()
        return "sent"

    def come_back() -> None:
        wait_until(lambda: caplog.text.count("will be tried again") >= 2, "it was tried again")
        proxy.accept()

    async def handler_async(message: Message) -> str:
        return handler(message)

    decorated = idempotent(handler_async if is_async else handler, ledger=remote)
    assert result_of(decorated(MESSAGE)) == "sent"
    assert ledger.acquire("m").state is LeaseState.COMPLETED
    assert result_of(decorated(MESSAGE)) == "sent"
    assert runs == [1]


def test_a_store_that_stays_away_for_longer_than_the_lease_is_an_error(
    remote: PostgresLedger, proxy: TcpProxy, ledger: PostgresLedger
) -> None:
    def handler(message: Message, lease: Lease) -> None:
        unknown.append(lease.unknown_attempts)
        proxy.refuse()
        proxy.cut()

    unknown: list[int] = []
    with pytest.raises(LedgerError) as caught:
        idempotent(handler, ledger=remote, lease=1.0)(MESSAGE)
    assert not caught.value.permanent
    # The next one is told that the work may have been done.
    lease = wait_until(lambda: ledger.acquire("m").lease, "it has run out")
    assert lease is not None
    assert [*unknown, lease.unknown_attempts] == [0, 1]


def test_work_that_was_taken_over_is_told_so_and_the_others_result_stays(
    ledger: PostgresLedger, expire: Callable[[str], None]
) -> None:
    def handler(message: Message) -> str:
        expire("m")
        ledger.complete(acquired(ledger, "m"), b'"theirs"')
        return "mine"

    decorated = idempotent(handler, ledger=ledger)
    with pytest.raises(LeaseLost):
        decorated(MESSAGE)
    assert decorated(MESSAGE) == "theirs"


def test_a_handler_that_fails_when_its_work_was_taken_over_fails_and_nothing_else(
    ledger: PostgresLedger, expire: Callable[[str], None]
) -> None:
    def handler(message: Message) -> str:
        expire("m")
        acquired(ledger, "m")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        idempotent(handler, ledger=ledger)(MESSAGE)
    assert ledger.acquire("m").state is LeaseState.IN_FLIGHT, "the other one's lease is not released"


# --- in flight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_is_in_flight_is_told_so_at_once(ledger: PostgresLedger, is_async: bool) -> None:
    acquired(ledger, "m", seconds=LONG)
    handler = kinds(ledger, [])["coroutine function" if is_async else "function"]
    with pytest.raises(InFlight) as caught:
        result_of(handler(MESSAGE))
    assert caught.value.message_ids == ("m",)
    assert caught.value.seconds is not None
    assert LONG - 30 < caught.value.seconds <= LONG


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("end", ["completed", "released", "died", "neither"])
def test_whoever_waits_gets_the_others_result_or_takes_over(
    ledger: PostgresLedger, expire: Callable[[str], None], is_async: bool, end: str
) -> None:
    unknown: list[int] = []

    def handler(message: Message, lease: Lease) -> str:
        unknown.append(lease.unknown_attempts)
        return "mine"

    async def handler_async(message: Message, lease: Lease) -> str:
        return handler(message, lease)

    lease = acquired(ledger, "m", seconds=LONG)
    asked = threading.Event()

    class Observed(PostgresLedger):
        def acquire(
            self, message_id: str, *, seconds: float = LEASE_SECONDS, fingerprint: bytes | None = None
        ) -> Acquisition:
            acquisition = super().acquire(message_id, seconds=seconds, fingerprint=fingerprint)
            if acquisition.state is LeaseState.IN_FLIGHT:
                asked.set()
            return acquisition

    observed = Observed(ledger._engine, "mailing")
    wait = 0.3 if end == "neither" else 30.0
    decorated: Any = idempotent(handler_async if is_async else handler, ledger=observed, wait=wait)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: result_of(decorated(MESSAGE)))
        assert asked.wait(20)
        match end:
            case "completed":
                ledger.complete(lease, b'"theirs"')
            case "released":
                ledger.release(lease)
            case "died":
                expire("m")
            case "neither":
                with pytest.raises(InFlight):
                    waiting.result(20)
                return
        assert waiting.result(20) == ("theirs" if end == "completed" else "mine")
    assert unknown == {"completed": [], "released": [0], "died": [1]}[end]


def test_of_32_threads_with_one_message_one_runs_it_and_all_have_its_result(engine: Engine) -> None:
    gate = threading.Barrier(32)
    runs: list[int] = []

    @idempotent(ledger=PostgresLedger(engine, "mailing"), wait=60)
    def handler(message: Message) -> int:
        runs.append(threading.get_ident())
        return threading.get_ident()

    def call(_: int) -> int:
        gate.wait()
        return handler(MESSAGE)

    with ThreadPoolExecutor(32) as pool:
        results = set(pool.map(call, range(32)))
    assert len(runs) == 1
    assert results == set(runs)


def test_of_32_tasks_with_one_message_one_runs_it_and_all_have_its_result(ledger: PostgresLedger) -> None:
    runs: list[str] = []

    @idempotent(ledger=ledger, wait=60)
    async def handler(message: Message) -> str:
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        runs.append(task.get_name())
        return task.get_name()

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(handler(MESSAGE) for _ in range(32)))

    results = asyncio.run(all_at_once())
    assert len(results) == 32
    assert set(results) == set(runs)
    assert len(runs) == 1


def test_handlers_of_different_messages_may_call_each_other(ledger: PostgresLedger) -> None:
    ran: list[str] = []

    @idempotent(ledger=ledger)
    def handler(message: Message) -> str:
        ran.append(message.id)
        return handler(Message("inner", b"")) + "!" if message.id == "m" else "inner's"

    assert [handler(MESSAGE) for _ in range(2)] == ["inner's!"] * 2
    assert ran == ["m", "inner"]


def test_a_handler_that_would_wait_for_itself_is_told_so(ledger: PostgresLedger) -> None:
    @idempotent(ledger=ledger)
    def handler(message: Message) -> None:
        handler(message)

    with pytest.raises(InvalidConfiguration, match="waits for itself"):
        handler(MESSAGE)
    assert acquired(ledger, "m").attempt == 2, "and it is released"


def test_an_idempotent_handler_may_be_wrapped_in_another_ledgers_leases(engine: Engine) -> None:
    fences: list[int] = []

    @idempotent(ledger=PostgresLedger(engine, "outer"))
    @idempotent(ledger=PostgresLedger(engine, "inner"))
    def handler(message: Message, lease: Lease) -> str:
        fences.append(lease.fence)
        return lease.subscriber_id

    assert handler(MESSAGE) == "inner"  # type: ignore[call-arg]
    assert len(fences) == 1


# --- the id and the payload -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fingerprint", "same", "other"),
    [
        (True, Message("m", MESSAGE.body, {"a": "b"}), Message("m", b"other")),
        (lambda message: message.headers.get("to", ""), Message("m", b"other"), Message("m", b"", {"to": "bob"})),
    ],
    ids=["True", "a function"],
)
def test_another_payload_under_the_same_id_is_refused(
    ledger: PostgresLedger, fingerprint: Any, same: Message, other: Message
) -> None:
    handler = idempotent(lambda message: "sent", ledger=ledger, fingerprint=fingerprint)
    assert handler(MESSAGE) == "sent"
    assert handler(same) == "sent"
    with pytest.raises(Mismatch) as caught:
        handler(other)
    assert caught.value.message_ids == ("m",)


def test_without_a_fingerprint_the_id_decides(ledger: PostgresLedger) -> None:
    handler = idempotent(lambda message: message.text, ledger=ledger)
    assert [handler(MESSAGE), handler(Message("m", b"other"))] == [MESSAGE.text] * 2


def test_the_id_may_be_anything_that_the_arguments_say(ledger: PostgresLedger) -> None:
    @idempotent(
        ledger=ledger,
        identify=lambda order, *, to: f"{order['id']}/{to}",
        fingerprint=lambda order, *, to: json.dumps(order),
    )
    def send(order: dict[str, Any], *, to: str) -> str:
        return f"{order['id']} to {to}"

    assert send({"id": 1}, to="ann") == "1 to ann"
    assert send({"id": 1}, to="bob") == "1 to bob"
    with pytest.raises(Mismatch):
        send({"id": 1, "rush": True}, to="ann")
    assert ledger.acquire("1/ann").state is LeaseState.COMPLETED


def test_the_lease_is_handed_to_a_handler_that_names_it(ledger: PostgresLedger, expire: Callable[[str], None]) -> None:
    seen: list[Lease] = []

    @idempotent(ledger=ledger, lease=LONG)
    def handler(message: Message, *, lease: Lease) -> None:
        seen.append(lease)
        lease.ensure()

    killed = acquired(ledger, "m")
    expire("m")
    handler(MESSAGE)  # type: ignore[call-arg]
    (lease,) = seen
    assert (lease.subscriber_id, lease.message_id) == ("mailing", "m")
    assert (lease.attempt, lease.unknown_attempts, lease.seconds) == (2, 1, LONG)
    assert lease.fence > killed.fence


def test_nothing_is_acquired_when_the_message_cannot_be_found(ledger: PostgresLedger) -> None:
    handler = idempotent(lambda *messages: None, ledger=ledger)
    for arguments in ((), ("m",), (MESSAGE, Message("n", b""))):
        with pytest.raises(InvalidConfiguration, match="identify="):
            handler(*arguments)
    assert acquired(ledger, "m").attempt == 1


def test_what_returns_a_coroutine_without_being_a_coroutine_function_is_refused_and_released(
    ledger: PostgresLedger,
) -> None:
    async def send(message: Message) -> None: ...

    handler = idempotent(lambda message: send(message), ledger=ledger)
    with pytest.raises(InvalidConfiguration, match="so its work is not done"):
        handler(MESSAGE)
    assert acquired(ledger, "m").unknown_attempts == 0


def test_a_short_pause_is_enough_between_looks() -> None:
    assert leased.WAIT_BACKOFF.longest_seconds <= 1.0
