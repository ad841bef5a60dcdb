"""The rights that examples/postgres/roles.sql grants are enough for what it grants them for."""

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, sessionmaker
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from support.documents import blocks
from support.postgres.roles import restricted
from support.postgres.statements import run
from support.txbox.leases import acquired
from support.waiting import wait_until
from support.workers.memory_worker import at_work, make, messages, work_off
from txbox import DeadLetter, DeadLetters, Expired, Inbox, Message, Outcome, Reason, RightsMissing
from txbox.backoff import Backoff
from txbox.instrumentation import DatabaseLost, DatabaseRestored, Event
from txbox.leases import PostgresLedger
from txbox.maintenance import Maintainer, Retention
from txbox.maintenance.rotation import Generations, InboxConversion
from txbox.outbox import Outbox, Outgoing, Subscriptions
from txbox.outbox.status import read_outbox_status
from txbox.relay import OutboxMessage, Refused, Relay
from txbox.status.exporter.figures import FiguresReader
from txbox.watermarks import Advance, Watermarks
from txbox_cli.app import run as txbox
from txbox_http import Idempotency, IdempotencyMiddleware, InTransaction, everyone, posts_and_patches
from txbox_spark.archive.archive_folder import BEGINNING, PROCESSED, SENT, ArchiveStretch
from txbox_spark.archive.archive_ledger import ArchiveLedger
from txbox_spark.loading.ledger import LoadLedger
from txbox_workers.memory_source import MemorySource

REPOSITORY = Path(__file__).parents[2]
ROLES = (REPOSITORY / "examples" / "postgres" / "roles.sql").read_text().split("\n\n")
"""The statements of each role, or of two that belong together."""


@contextmanager
def granted(
    engine: Engine, names: tuple[str, ...], texts: Sequence[str] = ROLES, *, optional: bool = True
) -> Iterator[list[Engine]]:
    """Engines of roles that one of the texts creates, by its names of them; with conditional grants, or without."""
    grants = next(text for text in texts if names[0] in text)
    if not optional:
        grants = re.sub("-- Where[^;]*;", "", grants)
    roles = {name: f"{name}_{uuid.uuid4().hex[:8]}" for name in names}
    for name, role in roles.items():
        grants = grants.replace(name, role)
    with engine.begin() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
        connection.exec_driver_sql(grants)
        connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO {', '.join(roles.values())}")
    engines = []
    for role in roles.values():
        options = f"-csearch_path={schema} -crole={role}"
        engines.append(create_engine(engine.url.update_query_dict({"options": options})))
        with engines[-1].connect() as connection:
            assert connection.exec_driver_sql("SELECT current_user").scalar_one() == role
    try:
        yield engines
    finally:
        for one in engines:
            one.dispose()
        with engine.begin() as connection:
            for role in roles.values():
                connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.fixture
def roles(engine: Engine) -> Iterator[Callable[..., list[Engine]]]:
    """As ``granted``: roles("txbox_worker")."""
    with ExitStack() as stack:
        yield lambda *names: stack.enter_context(granted(engine, names))


class Picky:
    def send(self, messages: "list[OutboxMessage]") -> list[Refused]:
        return [Refused(message, "no") for message in messages if message.key == "refused"]


def test_for_publishing_and_a_relay(engine: Engine, roles: Callable[..., list[Engine]]) -> None:
    publisher, sender = roles("txbox_publisher", "txbox_relay")
    outbox = Outbox()
    with publisher.begin() as connection:
        outbox.check(connection)
        for key, delay in (("fine", None), ("refused", None), ("refused", None), ("late", 0.1)):
            outbox.publish(connection, "own:x", "{}", key=key, delay=delay)
    relay = Relay(
        sender,
        {"own": Picky()},
        max_attempts=2,
        backoff=Backoff(first_seconds=0.01, longest_seconds=0.01),
        keep_sent=timedelta(milliseconds=1),
    )
    with at_work(relay):
        wait_until(lambda: relay.sent == 2 and len(DeadLetters(engine).list()) == 2, "two are sent, two are parked")
        assert read_outbox_status(engine).relays
    assert read_outbox_status(engine).messages == 0
    assert read_outbox_status(engine).relays == ()


def test_for_publishing_to_topics_and_saying_who_gets_them(engine: Engine, roles: Callable[..., list[Engine]]) -> None:
    publisher, _, operator = *roles("txbox_publisher", "txbox_relay"), *roles("txbox_reader", "txbox_operator")[1:]
    subscriptions = Subscriptions(operator)
    assert subscriptions.add("sold", "billing")
    assert len(subscriptions.list()) == 1
    with publisher.begin() as connection:
        Outbox().publish(connection, "topic:sold", "")
        Outbox().publish_many(connection, [Outgoing("topic:sold", "")])
    assert subscriptions.remove("sold", "billing")


def test_a_publisher_that_knows_no_topics_needs_no_right_on_subscriptions(engine: Engine) -> None:
    with granted(engine, ("txbox_publisher", "txbox_relay"), optional=False) as (publisher, _):
        with publisher.begin() as connection:
            Outbox().publish_many(connection, [Outgoing("inbox:billing", "")])
            Outbox().publish(connection, "inbox:billing", "")
        with publisher.connect() as connection, pytest.raises(ProgrammingError, match="permission denied"):
            Outbox().publish(connection, "topic:sold", "")


def test_for_a_maintainer(engine: Engine, roles: Callable[..., list[Engine]]) -> None:
    run(engine, "INSERT INTO processed_message VALUES ('billing', 'old', now() - interval '31 days')")
    ledger = PostgresLedger("mailing", engine=engine)
    ledger.complete(acquired(ledger, "m"), b"done")
    run(engine, "UPDATE message_lease SET completed_at = now() - interval '31 days'")
    run(
        engine,
        "INSERT INTO kept_response VALUES ('billing', 'old', now() - interval '31 days', '', 201, '[]', '')",
    )
    (limited,) = roles("txbox_maintainer")
    days = timedelta(days=30)
    retention = Retention({"*": days}, leases=days, results=days, letters=days, operations=days, sent=days, loads=days)
    maintainer = Maintainer(limited, retention)
    assert {one.task for one in maintainer.plan() if one.rows} == {"inbox", "leases", "responses", "results"}
    report = maintainer.run_once()
    assert not report.failed
    removed = report.removed
    assert (removed["inbox"], removed["results"] + removed["leases"]) == (1, 2)
    assert removed["responses"] == 1
    others = {"failures", "letters", "operations", "selections", "loads", "chunks", "relays", "workers", "sent"}
    assert others <= {*removed}


def test_for_a_web_service(engine: Engine, roles: Callable[..., list[Engine]]) -> None:
    (limited,) = roles("txbox_web")
    once = Idempotency(InTransaction(sessionmaker(limited), Inbox("billing")), caller=everyone)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("done", 201)(scope, receive, send)

    client = TestClient(IdempotencyMiddleware(answer, once, covers=posts_and_patches))
    answers = [client.post("/", headers={"idempotency-key": "k1"}) for _ in range(2)]
    assert [(one.text, "idempotent-replayed" in one.headers) for one in answers] == [("done", False), ("done", True)]


def test_for_a_web_service_whose_subscriber_forgets(engine: Engine) -> None:
    run(engine, "INSERT INTO inbox_horizon (subscriber_id, horizon) VALUES ('billing', now() - interval '1 day')")
    inbox, old = Inbox("billing"), datetime.now(UTC) - timedelta(days=2)
    with granted(engine, ("txbox_web",), optional=False) as (limited,):
        with limited.begin() as connection:
            assert inbox.record(connection, "new", sent_at=datetime.now(UTC))
        with limited.begin() as connection, pytest.raises(Expired):
            inbox.record(connection, "old", sent_at=old)


def test_for_an_operator(
    engine: Engine,
    roles: Callable[..., list[Engine]],
    queue: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Letters of a worker and of a relay, what was sent, pauses, and whatever is only read."""
    with engine.begin() as connection:
        for key in ("fine", "refused", "refused"):
            Outbox().publish(connection, "own:x", "{}", key=key)
    relay = Relay(engine, {"own": Picky()}, max_attempts=1, keep_sent=timedelta(days=1))
    with at_work(relay):
        wait_until(lambda: relay.sent == 1 and len(DeadLetters(engine).list()) == 2, "one is sent, two are parked")
    for message_id in ("a", "b", "c"):
        DeadLetters(engine).park(DeadLetter("billing", message_id, Reason.FAILED, "no", 1, queue, b"{}"))
    reader, limited = roles("txbox_reader", "txbox_operator")
    exported = FiguresReader(reader, None, "").read()
    assert exported.up
    assert [name for name, part in exported.parts.items() if not part.succeeded] == []
    monkeypatch.setenv("TXBOX_DATABASE_URL", reader.url.render_as_string(hide_password=False))
    for command in ("status", "audit", "dead-letters list --all"):
        assert txbox(command.split()) == 0, (command, capsys.readouterr().err)
    assert txbox(["pause", "billing", "--subscriber", "--force"]) == 1
    monkeypatch.setenv("TXBOX_DATABASE_URL", limited.url.render_as_string(hide_password=False))
    for command in (
        "dead-letters list --all",
        "dead-letters redrive --all --destination own:x",
        "dead-letters redrive --subscriber billing --message-id a",
        "dead-letters discard --subscriber billing --message-id b --note gone",
        "dead-letters redrive --all --subscriber billing --json-path $",
        f"dead-letters import --subscriber billing --source {queue} {queue}",
        "dead-letters operations",
        "outbox sent",
        "outbox replay --since 1h --yes",
        "pause billing --subscriber --force",
        "resume billing",
        "status",
        "audit",
        "loads list",
        "db check",
    ):
        assert txbox(command.split()) == 0, (command, capsys.readouterr().err)
    assert read_outbox_status(limited).messages == 3


@pytest.mark.parametrize("name", ["txbox_worker", "txbox_web"])
def test_to_record_what_is_parked_in_an_older_generation(
    engine: Engine, roles: Callable[..., list[Engine]], name: str
) -> None:
    assert DeadLetters(engine).park(DeadLetter("billing", "parked", Reason.FAILED, "no", 1, "queue", b"{}"))
    assert InboxConversion(engine).forward()
    assert Generations(engine).rotate()
    (limited,) = roles(name)
    with limited.begin() as connection:
        assert not Inbox("billing").record(connection, "parked")


def test_for_an_archiver(engine: Engine) -> None:
    texts = [block.text for block in blocks(REPOSITORY / "docs" / "archive.md")]
    now = datetime.now(UTC)
    with granted(engine, ("txbox_archiver",), texts) as (archiver,):
        ledger = ArchiveLedger(archiver, None, "", "lake")
        ledger.check()
        state = ledger.begin()
        ledger.wait_until_settled(ledger.cutoff(timedelta(hours=1)), wait_seconds=60)
        assert (ledger.count_sent(BEGINNING, now), ledger.count_processed(BEGINNING, now)) == (([], 0), {})
        with archiver.connect() as connection:
            for statement in (ledger.sql.rows_sent, ledger.sql.rows_processed):
                assert connection.exec_driver_sql(statement).all() == []
        stretch = ArchiveStretch(state.archive_id, "run", BEGINNING, now, {SENT: {}, PROCESSED: {}})
        assert ledger.propose(stretch, None)
        assert not ledger.propose(stretch, None)
        assert ledger.finish(stretch)
        assert not ledger.finish(stretch)
        assert ledger.begin().archived_upto == now
        assert ledger.release()


def test_for_leases_and_watermarks(roles: Callable[..., list[Engine]]) -> None:
    (limited,) = roles("txbox_lease")
    ledger = PostgresLedger("mailing", engine=limited)
    ledger.check()
    ledger.release(acquired(ledger, "m"))
    lease = acquired(ledger, "m")
    ledger.renew(lease)
    ledger.complete(lease, b"done")
    with limited.begin() as connection:
        watermarks = Watermarks("billing")
        assert watermarks.advance(connection, "account", "ann", 1) is Advance.APPLIED
        assert watermarks.advance(connection, "account", "ann", 3, insist=True) is Advance.GAP
        assert watermarks.advance(connection, "account", "bob", 2, insist=True) is Advance.GAP
        assert watermarks.advance_many(connection, [("account", "ann", 2)]) == [Advance.APPLIED]


def test_for_a_worker(engine: Engine, roles: Callable[..., list[Engine]], caplog: pytest.LogCaptureFixture) -> None:
    def handle(_session: Session, message: Message) -> None:
        if message.id == "bad":
            raise ValueError("bad")

    (limited,) = roles("txbox_worker")
    inbox = Inbox("billing", fingerprint=True)
    worker = work_off(MemorySource(messages("a", "bad", "a")), limited, handle, inbox=inbox, max_attempts=3)
    with limited.connect() as connection:
        role = connection.exec_driver_sql("SELECT current_user").scalar_one()
    with engine.begin() as connection:
        connection.exec_driver_sql(f"REVOKE ALL ON paused FROM {role}")
    source = MemorySource(messages("later"))
    with caplog.at_level("WARNING", "txbox.worker"):
        work_off(source, limited, handle, inbox=inbox)  # as before step 7, with the grants of then
    assert "cannot report that it works, and notices no pause: " in caplog.text
    assert "the right to SELECT on paused is lacking; GRANT SELECT ON paused TO this user" in caplog.text
    with engine.begin() as connection:  # what the page says of redriving
        connection.exec_driver_sql(
            f"GRANT SELECT ON message_lease TO {role}; "
            f"GRANT SELECT, INSERT, UPDATE ON dead_letter_operation, dead_letter_selection TO {role}"
        )
    letters = DeadLetters(limited)
    (letter,) = letters.list()
    assert letters.redrive(letter.dead_letter_id or 0, lambda _: None).message_id == "bad"
    assert worker.counts == {Outcome.PROCESSED: 1, Outcome.DUPLICATE: 1, Outcome.FAILED: 2, Outcome.DEAD: 1}


def start_relay(engine: Engine, **where: str) -> None:
    Relay(engine, {"own": Picky()}, keep_sent=timedelta(days=1), **where).start()  # type: ignore[arg-type]


def start_worker(engine: Engine) -> None:
    make(MemorySource(), engine).start()


def start_maintainer(engine: Engine) -> None:
    Maintainer(engine).start()


def check_loads(engine: Engine) -> None:
    LoadLedger(engine).check()


@pytest.mark.parametrize(
    ("start", "right", "table"),
    [
        *((start_relay, right, "outbox_message") for right in ("SELECT", "UPDATE, DELETE")),
        *((start_relay, right, "outbox_relay") for right in ("SELECT", "INSERT")),
        *((start_relay, right, "outbox_sent") for right in ("SELECT", "INSERT")),
        *((start_relay, right, "dead_letter") for right in ("SELECT", "INSERT, UPDATE")),
        (start_relay, "SELECT", "paused"),
        *((start_worker, "SELECT", table) for table in ("processed_message", "processed_earlier", "inbox_horizon")),
        *((start_worker, "SELECT", table) for table in ("message_failure", "dead_letter")),
        *((start_maintainer, "SELECT", table) for table in ("maintenance", "processed_message", "archive")),
        (start_relay, "SELECT", "archive"),
        *((check_loads, "SELECT", table) for table in ("bulk_load", "bulk_load_chunk")),
    ],
)
def test_what_lacks_a_right_does_not_start_and_says_which(
    engine: Engine, start: Callable[[Engine], None], right: str, table: str
) -> None:
    with restricted(engine, f"{right} ON {table}") as limited, pytest.raises(RightsMissing) as caught:
        start(limited)
    assert (caught.value.table, caught.value.rights) == (table, right)


def test_a_schema_that_may_not_be_used_is_named(engine: Engine) -> None:
    with engine.connect() as connection:
        schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
    with restricted(engine, f"USAGE ON SCHEMA {schema}") as limited, pytest.raises(RightsMissing) as caught:
        start_relay(limited, schema=schema)
    assert (caught.value.table, caught.value.rights) == (f'SCHEMA "{schema}"', "USAGE")


def test_a_maintainer_goes_on_once_it_may_read_again(engine: Engine) -> None:
    heard: list[Event] = []
    with restricted(engine) as limited, at_work(Maintainer(limited, interval_seconds=0.01, hooks=[heard.append])):
        role = limited.url.query["options"].rpartition("-crole=")[2]  # type: ignore[union-attr]
        run(engine, f"REVOKE SELECT ON processed_message FROM {role}")
        (lost,) = wait_until(lambda: [event for event in heard if isinstance(event, DatabaseLost)][:1])
        run(engine, f"GRANT SELECT ON processed_message TO {role}")
        wait_until(lambda: any(isinstance(event, DatabaseRestored) for event in heard))
    assert isinstance(lost.error, RightsMissing)
