"""A storm: an inbox is rotated and forgotten as fast as it lets itself, and what rotates it is killed all the time.

Meanwhile ids are recorded in batches, one by one, by chunks of a bulk load of either writer, and as keys of requests;
they are parked, imported from a dead-letter queue of SQS, and redriven; at all isolation levels, a third of them for
the second time or more. What is told that an id is first writes it, in the same transaction, into a table that refuses
nothing. In the end each id is there once.

``TXBOX_STORM_ROTATIONS`` and ``TXBOX_STORM_RECORDINGS`` make it longer.
"""

import itertools
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import httpx2
import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support.aws.queues import send
from support.waiting import wait_until
from support.web.service import served
from txbox import DeadLetters, Failures, Inbox, InFlight, LetterNotFound
from txbox.dead_letters.letter import DeadLetter, Reason
from txbox.maintenance.rotation import Generations, InboxConversion, conversion, generations
from txbox.postgres.sqlstates import is_outage, is_retryable
from txbox_aws.sqs import DeadLetterQueue
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone
from txbox_spark.merging.chunk_merger import begin_chunk, merge_chunk
from txbox_spark.merging.fresh_event import create_fresh
from txbox_spark.merging.merge_plan import ChunkCounts, MergePlan

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

ROTATIONS = int(os.environ.get("TXBOX_STORM_ROTATIONS", "25"))
RECORDINGS = int(os.environ.get("TXBOX_STORM_RECORDINGS", "20000"))
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
REPEATED_SECONDS = 3.0
"""An id is recorded again for so long at least; then its generation may be forgotten."""

KILLED_SECONDS = 1.5
"""Between two kills, on average: a generation can be forgotten between them, and often is not."""

BATCH = 60
NEW = 2 * BATCH // 3


class Storm:
    """Threads that record, and what they have been told."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inbox = Inbox("storm")
        self.letters = DeadLetters(engine)
        self.stopping = threading.Event()
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.recordings = 0
        self.imported = 0
        self.answers: Counter[int] = Counter()
        self.tried: set[str] = set()
        self._recent: deque[tuple[float, str]] = deque(maxlen=20_000)
        self._turns: dict[threading.Thread, int] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def ids(self, count: int = BATCH, new: int = NEW) -> list[str]:
        """Return ids, two thirds of which are new; the others were tried a moment ago, by this thread or another."""
        with self._lock:
            repeated = [
                self._recent[random.randrange(len(self._recent))][1] for _ in range(count - new) if self._recent
            ]
            fresh = [f"m-{next(self._numbers):09}" for _ in range(new)]
            self._recent += [(time.monotonic(), one) for one in fresh]
        return [*fresh, *repeated]

    def move_horizon(self, seconds: float = 0) -> None:
        """Let no id be repeated that is older than so many seconds, and move the horizon there."""
        with self.engine.begin() as connection:
            horizon = connection.exec_driver_sql(
                "SELECT clock_timestamp() - make_interval(secs => %s)", (seconds,)
            ).scalar_one()
        with self._lock:
            while self._recent and self._recent[0][0] < time.monotonic() - seconds:
                self._recent.popleft()
            before = dict(self._turns)
        wait_until(
            lambda: self.errors or all(self._turns[thread] > turn for thread, turn in before.items()),
            "each thread has ended the turn that may repeat such an id",
            timeout=120,
        )
        with self.engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('storm', %s) "
                "ON CONFLICT (subscriber_id) DO UPDATE SET horizon = excluded.horizon",
                (horizon,),
            )

    def note(self, ids: list[str]) -> None:
        with self._lock:
            self.tried |= set(ids)
            self.recordings += len(ids)

    def start(self, *turns: tuple[Callable[[Connection], None], str]) -> None:
        """Start a thread for each; all of them are known before the first one runs."""
        self.threads += [self._thread(turn, level) for turn, level in turns]
        self._turns.update(dict.fromkeys(self.threads, 0))
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def check(self) -> str:
        """See that each id that was tried was let in once, by what was written for it; return how many."""
        self.end()
        assert self.errors == []
        with self.engine.connect() as connection:
            admitted = Counter(connection.exec_driver_sql("SELECT message_id FROM admitted").scalars())
        twice, lost = [one for one, times in admitted.items() if times > 1], self.tried - admitted.keys()
        assert twice == []
        assert lost == set()
        repeats = self.recordings - len(admitted)
        assert repeats > self.recordings / 10, "many were repeats"
        return f"{self.recordings:,} recordings, {repeats:,} of them repeats, {len(twice)} twice, {len(lost)} lost"

    def _thread(self, turn: Callable[[Connection], None], level: str) -> threading.Thread:
        def run() -> None:
            while not self.stopping.is_set():
                self._turns[threading.current_thread()] += 1
                try:
                    with self.engine.connect() as connection:
                        turn(connection.execution_options(isolation_level=level))
                except InFlight:
                    continue
                except DBAPIError as error:
                    if not is_retryable(error):
                        self.errors.append(error)
                        return
                except Exception as error:  # noqa: BLE001 - the test raises it
                    self.errors.append(error)
                    return

        return threading.Thread(target=run)

    def record_batch(self, connection: Connection) -> None:
        ids = self.ids()
        with connection.begin():
            if random.random() < 0.3:
                connection.exec_driver_sql("SELECT")  # a snapshot, where the transaction has one
                time.sleep(random.random() / 20)
            admit(connection, self.inbox.record_many(connection, ids))
        self.note(ids)

    def record_one(self, connection: Connection) -> None:
        (message_id,) = self.ids(1, random.choice((0, 1, 1))) or self.ids(1, 1)
        with connection.begin():
            if random.random() < 0.3:
                connection.exec_driver_sql("SELECT")
                time.sleep(random.random() / 20)
            if self.inbox.record(connection, message_id):
                admit(connection, {message_id})
        self.note([message_id])

    def park(self, connection: Connection) -> None:
        """Park a message that others try at the same time, redrive it, and let its copy be recorded."""
        ids = self.ids(2, 1)
        for message_id in ids:
            letter = DeadLetter("storm", message_id, Reason.FAILED, "broken", 1, "queue", b"body", {}, {})
            number = self.letters.park(letter)
            if number is not None:
                time.sleep(random.random() / 10)
                self._redrive(number)
        self._record_copies(connection, ids)

    def import_letters(self, sqs: "SQSClient", queue: str, dead: str) -> Callable[[Connection], None]:
        """Take messages over from a dead-letter queue, redrive them, and let their copies be recorded."""
        there = DeadLetterQueue(dead, client=sqs)

        def turn(connection: Connection) -> None:
            ids = self.ids(4, 2)
            send(sqs, dead, ids)
            self.imported += there.import_letters(self.letters, Failures(self.engine, "storm"), source=queue).parked
            for letter in self.letters.list("storm"):
                if letter.message_id in ids:
                    self._redrive(letter.dead_letter_id or 0)
            self._record_copies(connection, ids)

        return turn

    def _redrive(self, number: int) -> None:
        with suppress(LetterNotFound):  # it was redriven by another thread
            self.letters.redrive(number, lambda _: None)

    def _record_copies(self, connection: Connection, ids: list[str]) -> None:
        while True:
            try:
                with connection.begin():
                    admit(connection, self.inbox.record_many(connection, ids))
                break
            except DBAPIError as error:
                if not is_retryable(error):
                    raise
            except InFlight:
                continue
        self.note(ids)

    @contextmanager
    def service(self, url: str, level: str) -> Iterator[httpx2.Client]:
        """Serve requests whose handler admits their key."""
        engine = create_engine(url, isolation_level=level)
        once = Idempotency(InTransaction(sessionmaker(engine), Inbox("storm", wait_seconds=0.2)), caller=everyone)

        async def apply(request: Request) -> Response:
            session: Session = await once(request)
            await run_in_threadpool(lambda: admit(session.connection(), {request.headers["idempotency-key"]}))
            return Response(status_code=201)

        with served(IdempotencyMiddleware(Starlette(routes=[Route("/", apply, methods=["POST"])]), once)) as client:
            yield client
        engine.dispose()

    def send_to(self, client: httpx2.Client) -> Callable[[Connection], None]:
        """Send requests with a key, until the answer says that it is done."""

        def turn(_: Connection) -> None:
            (key,) = self.ids(1, random.choice((0, 1, 1))) or self.ids(1, 1)
            wait_until(lambda: self._is_done(client, key), f"a request with the key {key} is done", timeout=120)
            self.note([key])

        return turn

    def _is_done(self, client: httpx2.Client, key: str) -> bool:
        response = client.post("/", headers={"idempotency-key": key})
        assert response.status_code in {201, 204, 409, 503}, response.text
        self.answers[response.status_code] += 1
        return response.is_success

    def load_chunk(self, staged: bool) -> Callable[[Connection], None]:
        chunks = itertools.count()
        apply = "INSERT INTO admitted SELECT message_id FROM fresh_event"
        plan = MergePlan(run_id=f"{staged:012x}", subscriber_id="storm", columns=(), apply=apply, stalled_seconds=10)

        def load(connection: Connection) -> None:
            ids = sorted(set(self.ids()))
            chunk = next(chunks)
            with connection.begin():
                assert begin_chunk(connection, plan, chunk)
                if not staged:
                    connection.exec_driver_sql(create_fresh(()))
                else:
                    connection.exec_driver_sql(
                        'CREATE TEMPORARY TABLE come (message_id text COLLATE "C") ON COMMIT DROP'
                    )
                table = "come" if staged else "fresh_event"
                connection.exec_driver_sql(f"INSERT INTO {table} SELECT unnest(%s::text[]) ORDER BY 1", (ids,))
                counts = ChunkCounts(len(ids), 0, len(ids))
                merge_chunk(connection, plan, chunk, ("m", None), counts, staged="come" if staged else None)
            self.note(ids)

        return load


def admit(connection: Connection, ids: set[str]) -> None:
    connection.exec_driver_sql("INSERT INTO admitted SELECT unnest(%s::text[])", (sorted(ids),))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def storm(engine: Engine, stack: ExitStack) -> Storm:
    with engine.begin() as connection:
        connection.exec_driver_sql('CREATE TABLE admitted (message_id text COLLATE "C")')
    storm = Storm(engine)
    stack.callback(storm.end)
    return storm


def rotate(engine: Engine, storm: Storm) -> None:
    """Rotate, and forget what nobody tries any more."""
    maintained = Generations(engine, wait=storm.stopping.wait)
    maintained.rotate(tries=5)
    if random.random() < 0.5:
        storm.move_horizon(REPEATED_SECONDS)
        maintained.forget(settled=maintained.settle(seconds=120), slack=timedelta(), tries=5)


@pytest.mark.chaos
@pytest.mark.timeout(3600)  # as long as it is asked to be
def test_a_storm_of_rotations_lets_no_id_in_twice_and_loses_none(
    storm: Storm,
    schema_url: str,
    sqs: "SQSClient",
    make_queue: Callable[..., str],
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("txbox_aws.sqs.dead_letter_queue.IMPORT_WAIT_SECONDS", 0)
    imports = storm.import_letters(sqs, make_queue(), make_queue())
    clients = [stack.enter_context(storm.service(schema_url, level)) for level in LEVELS]
    storm.start(
        *[(turn, level) for turn in (storm.record_batch, storm.record_one) for level in LEVELS],
        *[(turn, LEVELS[0]) for turn in (storm.load_chunk(staged=False), storm.load_chunk(staged=True))],
        *[(turn, LEVELS[0]) for turn in (storm.park, imports, *map(storm.send_to, clients))],
    )
    assert InboxConversion(storm.engine).forward()
    rotator = create_engine(schema_url, poolclass=NullPool, connect_args={"application_name": "storm"})
    killed = 0

    def kill() -> None:
        nonlocal killed
        while not storm.stopping.wait(random.random() * 2 * KILLED_SECONDS):
            found = 0
            while not found and not storm.stopping.wait(0.002):  # until it works: it has a connection for moments only
                with storm.engine.begin() as connection:
                    found = connection.exec_driver_sql(
                        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'storm'"
                    ).scalar_one()
            killed += found

    killer = threading.Thread(target=kill)
    killer.start()
    newest, kept, began = 0, 0, time.monotonic()
    while (newest <= ROTATIONS or storm.recordings < RECORDINGS or not killed) and not storm.errors:
        try:
            rotate(rotator, storm)
        except DBAPIError as error:
            if not is_outage(error):
                raise
        found = Generations(storm.engine).list()
        newest, kept = found[-1].generation, len(found)
    storm.stopping.set()
    killer.join()
    checked = storm.check()
    seconds = time.monotonic() - began
    print(  # noqa: T201 - for -s
        f"{newest - 1:,} rotations, {kept} generations kept, {killed} kills, {checked}, {storm.imported} imported, "
        f"requests answered {dict(storm.answers)}, {seconds:.0f} s"
    )
    assert killed > 0
    assert storm.imported > 0
    assert storm.answers[201] > 0


class Killer:
    """Ends the connection of what maintains at its n-th step: before that statement, or before the commit behind it.

    A statement that is run again and again, with a piece each time, is two steps: the first time, and the second.
    """

    def __init__(self, storm: Storm, url: str, step: int) -> None:
        self.engine = create_engine(url, poolclass=NullPool)
        self.steps = 0
        self._storm, self._step, self._last = storm, step, ""
        self._seen: Counter[str] = Counter()
        event.listen(self.engine, "before_cursor_execute", self._execute)
        event.listen(self.engine, "commit", lambda connection: self._count(connection, f"commit of {self._last}"))

    def _execute(self, connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        self._last = statement
        self._count(connection, statement)

    def _count(self, connection: Connection, what: str) -> None:
        self._seen[what] += 1
        if self._seen[what] <= 2:
            self.steps += 1
            if self.steps == self._step:
                pid = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
                with self._storm.engine.begin() as other:
                    other.exec_driver_sql("SELECT pg_terminate_backend(%s, 60000)", (pid,))


def convert(engine: Engine) -> bool:
    return InboxConversion(engine).forward()


def convert_back(engine: Engine) -> bool:
    return InboxConversion(engine).back()


def forget(engine: Engine) -> bool:
    maintained = Generations(engine)
    maintained.forget(settled=maintained.settle(seconds=120), slack=timedelta())
    return len(maintained.list()) == 1


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("change", [convert, convert_back, forget])
def test_what_changes_the_inbox_is_killed_at_each_step_and_goes_on(
    storm: Storm, schema_url: str, change: Callable[[Engine], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "BLOCKS_AT_ONCE", 16)
    monkeypatch.setattr(conversion, "LETTERS_AT_ONCE", 2)
    monkeypatch.setattr(generations, "MOVED_AT_ONCE", 2)
    letters = [DeadLetter("storm", f"l-{n}", Reason.FAILED, "broken", 1, "queue", b"body", {}, {}) for n in range(3)]
    numbers = [storm.letters.park(letter) for letter in letters]
    storm.start((storm.record_batch, "READ COMMITTED"), (storm.record_one, "REPEATABLE READ"))
    for step in itertools.count(1):
        enough = storm.recordings + 5 * BATCH
        wait_until(lambda enough=enough: storm.errors or storm.recordings > enough, "more is recorded", timeout=120)
        assert storm.errors == []
        if change is not convert:
            wait_until(lambda: convert(storm.engine), timeout=120)
            wait_until(lambda: Generations(storm.engine).rotate(), timeout=120)
        if change is forget:
            storm.move_horizon()
        killer, ended = Killer(storm, schema_url, step), False
        try:
            ended = change(killer.engine)
        except DBAPIError as error:
            if not is_outage(error):
                raise
        wait_until(lambda: change(storm.engine), "it goes on to its end", timeout=120)
        if change is convert:
            wait_until(lambda: convert_back(storm.engine), timeout=120)
        if ended and killer.steps < step:  # otherwise it did not get that far, as the inbox was in use all the time
            break
    assert step > 10, "it was killed at each of them"
    print(f"killed at {step - 1} steps, {storm.check()}")  # noqa: T201 - for -s
    with storm.engine.connect() as connection:
        parked = connection.exec_driver_sql(
            "SELECT message_id, dead_letter_id FROM processed_message WHERE dead_letter_id IS NOT NULL ORDER BY 1"
        ).all()
        kept = set(
            connection.exec_driver_sql(
                "SELECT message_id FROM processed_message WHERE dead_letter_id IS NULL"
            ).scalars()
        )
    assert [(message_id, number) for message_id, number in parked] == [(f"l-{n}", numbers[n]) for n in range(3)]
    assert kept == storm.tried or (change is forget and kept < storm.tried)
