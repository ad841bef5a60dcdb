"""``txbox demo``: exact in spite of everything, able to see when it is not, and gone without a trace."""

import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest
from sqlalchemy import Engine, create_engine

from support.program import Ended, Running
from support.program import txbox as run_process
from support.waiting import wait_until
from txbox import TxboxError
from txbox_cli.app import run as run_here
from txbox_demo import fork_server, plan, worker_process
from txbox_demo import place as demo_place
from txbox_demo import run as demo_run
from txbox_demo.crew import NOTIFICATION, ROLES
from txbox_demo.place import Place
from txbox_demo.plan import Plan
from txbox_demo.run import run_demo
from txbox_demo.standing import Standing, read_standing

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

    from txbox_local import LocalAws

pytestmark = pytest.mark.chaos


@pytest.fixture
def on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo finds no servers in the environment."""
    for name in ("TXBOX_DATABASE_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SQS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def admin(database_url: str) -> Iterator[Engine]:
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


def schemas(admin: Engine) -> list[str]:
    with admin.connect() as connection:
        found = connection.exec_driver_sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'txbox_demo_%%'")
        return list(found.scalars())


def queues(sqs: "SQSClient") -> list[str]:
    return sqs.list_queues(QueueNamePrefix="txbox-demo-").get("QueueUrls", [])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost comes again sooner, or is given up sooner."""
    monkeypatch.setattr(demo_run, "VISIBILITY_SECONDS", 1)
    monkeypatch.setattr(demo_run, "LOST_SECONDS", 2.0)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Break the services, in their own processes: broken(script), which is run before anything is forked."""

    def break_it(script: str) -> None:
        whole = f"from txbox_demo import fork_server_process\n{script}\nfork_server_process.main()"
        monkeypatch.setattr(fork_server, "COMMAND", (sys.executable, "-c", whole))

    return break_it


DEMO = ("demo", "--without-spark")
SUBSCRIBERS = ("billing", "notification")


# --- it is exact -----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What a run of the demo has left behind."""

    ended: Ended
    figures: dict[str, Any]
    schemas: list[str]
    queues: list[str]


@pytest.fixture(scope="module")
def a_run(
    database_url: str,
    aws: "LocalAws",
    admin: Engine,
    sqs: "SQSClient",
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Run]:
    """A small demo, which keeps its schema and its queues."""
    file = tmp_path_factory.mktemp("demo") / "figures.json"
    arguments = ("--purchases", "400", "--url", database_url, "--keep", "--json", str(file))
    ended = run_process(*DEMO, *arguments, timeout=280)
    run = Run(ended, json.loads(file.read_text()) if ended.status in (0, 1) else {}, schemas(admin), queues(sqs))
    with admin.begin() as connection:
        for schema in run.schemas:
            connection.exec_driver_sql(f"ALTER SCHEMA {schema} RENAME TO seen_{schema}")
    yield run
    with admin.begin() as connection:
        for schema in run.schemas:
            connection.exec_driver_sql(f"DROP SCHEMA seen_{schema} CASCADE")


def is_exact(figures: dict[str, Any], purchases: int) -> None:
    assert (figures["exact"], figures["adds_up"], figures["contradictions"]) == (True, True, [])
    assert figures["wrong_customers"] == []
    assert figures["difference_dollars"] == "0.00"
    assert figures["found_dollars"] == figures["expected_dollars"]
    assert figures["purchases"] == figures["orders"]["placed"] == purchases
    assert figures["orders"]["rolled_back"] > 0
    assert figures["sent"]["messages"] == 2 * purchases
    assert figures["sent"]["sends"] == 2 * purchases + figures["sent"]["again"]
    assert figures["sent"]["again"] > 0.1 * purchases
    for subscriber in SUBSCRIBERS:
        delivered = figures[subscriber]
        outcomes = ("processed", "duplicates", "failed", "in_flight")
        assert delivered["adds_up"] is True
        assert delivered["received"] == sum(delivered[outcome] for outcome in outcomes)
        assert delivered["processed"] == purchases
        assert delivered["duplicate_share"] >= 0.2
    assert sum(figures[subscriber]["duplicate_share"] for subscriber in SUBSCRIBERS) / 2 >= 0.25
    mails = figures["notifications"]
    assert (mails["missing"], mails["repeated"], mails["wrong"]) == ([], [], [])
    # Who took over from a killed worker could not know whether the mail was sent.
    assert mails["once"] + mails["unsure_twice"] == purchases
    assert mails["unsure"] == mails["unsure_twice"] + mails["unsure_once"]
    assert mails["mails"] >= mails["once"] + 2 * mails["unsure_twice"]
    assert mails["unsure"] <= sum(figures["kills"]["notification"].values())
    assert mails["unsure_twice"] >= figures["kills"]["notification"]["sent"]
    assert mails["refused"] >= figures["notification"]["failed"] > 0
    assert figures["backlog"] == {"outbox": 0, "purchases_queue": 0, "notifications_queue": 0}
    assert figures["dead"] == 0


@pytest.mark.timeout(300)
def test_it_is_exact(a_run: Run) -> None:
    assert a_run.ended.status == 0, a_run.ended.err
    is_exact(a_run.figures, 400)
    assert (a_run.figures["customers"], a_run.figures["expected_dollars"]) == (96, "14663.01")


def test_processes_of_every_role_were_killed(a_run: Run) -> None:
    kills = a_run.figures["kills"]
    for role in ROLES:
        assert sum(kills[role.name].values()) >= 1, role.name
    assert kills["total"] >= 6
    assert a_run.figures["processes_started"] > kills["total"]


def test_it_shows_what_it_has_found(a_run: Run) -> None:
    figures, out = a_run.figures, a_run.ended.out
    mails = figures["notifications"]
    once, twice, others = mails["once"], mails["unsure_twice"], mails["unsure_once"]
    assert out.count("every customer is right to the cent, and was notified of every purchase") == 1
    assert f"notified of every purchase: of {once} once, of {twice} twice; " in out
    assert f"\nmailed twice: {twice}, each worker killed or stalled between the mail and its completion: nobody" in out
    assert f"; mailed once: {others}, which looked the same to the next worker\n" in out
    assert "\x1b" not in out + a_run.ended.err
    shown = {
        "orders": "400",
        "rolled back": f"{figures['orders']['rolled_back']:,}",
        "messages": "800",
        "sent again": f"{figures['sent']['again']:,}",
        "billing: delivered": f"{figures['billing']['received']:,}",
        "notification: delivered": f"{figures['notification']['received']:,}",
        "kills: relay": f"{sum(figures['kills']['relay'].values())}",
        "backlog": "0",
        "dead": "0",
        "mails": f"{mails['mails']}",
        "mails refused": f"{mails['refused']}",
        "mailed once": f"{once}",
        "unsure": f"{mails['unsure']}",
        "difference": "$0.00",
    }
    for name, figure in shown.items():
        assert re.search(rf"^ *{name} +{re.escape(figure)} ", out, re.MULTILINE), f"{name}: {out}"
    for subscriber in SUBSCRIBERS:
        assert f"{subscriber}: deliveries {figures[subscriber]['received']:,} = 400 processed + " in out


def test_keep_keeps_schema_and_queues(a_run: Run, admin: Engine, database_url: str) -> None:
    (schema,), (first, second) = a_run.schemas, sorted(a_run.queues, reverse=True)
    assert f"kept: schema {schema}, queues {first} {second}\n" in a_run.ended.out
    ended = run_process("status", "--url", database_url, "--schema", f"seen_{schema}", "--queue", first, "--json")
    assert json.loads(ended.out)["inbox_rows"] == 400
    with admin.connect() as connection:
        leases = connection.exec_driver_sql(
            f"SELECT completed_at IS NOT NULL, count(*) FROM seen_{schema}.message_lease GROUP BY 1"
        )
        assert leases.all() == [(True, 400)]


def last_act_is_exact(act: dict[str, Any], purchases: int, out: str) -> None:
    assert (act["exact"], act["adds_up"], act["wrong_customers"], act["difference_cents"]) == (True, True, 0, 0)
    load = act["load"]
    assert (load["read"], load["rejected"], load["duplicate_in_source"]) == (69_659, 0, 0)
    assert load["applied"] + load["already_processed"] == act["recorded"] == 69_659
    # Both roads were first with some: a third was sent before the load, and a chunk merged before the rest was sent.
    assert 0 < act["processed_by_workers"] < purchases
    assert load["already_processed"] == act["processed_by_workers"]
    assert re.search(r"^ *in the accounts +\$2,500,315\.63 ", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_is_exact_as_people_run_it(on_its_own: None, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with Running("demo", "--json", str(file)) as running:
        assert running.wait(timeout=380) == 0
    figures = json.loads(file.read_text())
    is_exact(figures, 3_000)
    last_act_is_exact(figures["last_act"], 7_000, "".join(running.out))
    assert figures["seconds"] < 120  # seconds; more than that nobody watches
    for subscriber in SUBSCRIBERS:
        assert figures[subscriber]["duplicate_share"] >= 0.30, subscriber
    assert figures["kills"]["total"] >= 20
    for role in ROLES:
        for moment in role.moments:
            assert figures["kills"][role.name][moment] >= 1, (role.name, moment)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_file_is_exact(on_its_own: None, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    with Running("demo", "--purchases", "69659", "--without-spark", "--json", str(file)) as running:
        assert running.wait(timeout=1740) == 0
    figures = json.loads(file.read_text())
    is_exact(figures, 69_659)
    assert (figures["customers"], figures["expected_dollars"]) == (23_570, "2500315.63")


# --- a mail, which no transaction covers -----------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("moment", "unsure", "twice"),
    [
        (worker_process.RECEIVED, False, False),
        (worker_process.SENDING, True, False),
        (worker_process.SENT, True, True),
        (worker_process.COMMITTED, False, False),
    ],
)
def test_only_a_worker_killed_between_mail_and_completion_has_a_mail_come_twice(
    moment: str, unsure: bool, twice: bool, database_url: str, aws: "LocalAws", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "NOTIFICATION", replace(NOTIFICATION, moments=(moment,)))
    report = run_demo(Plan(purchases=100, workers=2, kills=8, seed=1, database_url=database_url, own_broker=False))
    notices, killed = report.notices, report.kills["notification"][moment]
    assert report.exact, (report.contradictions, notices)
    assert killed >= 1
    assert notices.unsure == (killed if unsure else 0)
    assert (notices.unsure_twice, notices.unsure_once) == ((killed, 0) if twice else (0, notices.unsure))
    assert notices.mails == 100 + notices.unsure_twice


EAGER = """
from txbox_demo import notification

class Eager(notification.Notification):
    def __call__(self, message, lease):
        super().__call__(message, lease)
        if message.json()["purchase_id"] == "cdnow-00007":
            super().__call__(message, lease)

notification.Notification = Eager
"""

FORGETFUL = """
from sqlalchemy import text
from txbox.leases import PostgresLedger

acquire = PostgresLedger.acquire

def acquire_anew(self, message_id, **options):
    with self._engine.begin() as connection:
        forget = "UPDATE message_lease SET completed_at = NULL, failures = attempts WHERE message_id = :id"
        connection.execute(text(forget + " AND completed_at IS NOT NULL"), {"id": message_id})
    return acquire(self, message_id, **options)

PostgresLedger.acquire = acquire_anew
"""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("script", "contradiction"),
    [
        (EAGER, ""),
        (FORGETFUL, "processed twice"),
    ],
    ids=["a handler that mails twice", "a ledger that forgets"],
)
def test_a_second_mail_that_nothing_explains_is_seen(
    script: str, contradiction: str, database_url: str, aws: "LocalAws", broken: Callable[[str], None]
) -> None:
    broken(script)
    report = run_demo(Plan(purchases=100, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))
    assert not report.exact
    assert report.notices.repeated
    assert (report.notices.missing, report.notices.wrong, report.notices.unsure_twice) == ((), (), 0)
    assert report.notices.mails > 100
    assert report.comparison.exact
    if contradiction:
        assert any(contradiction in found for found in report.contradictions)
    else:
        assert report.notices.repeated == ("cdnow-00007",)
        assert report.adds_up


@pytest.mark.usefixtures("quick")
def test_a_ledger_that_forgets_what_a_killed_worker_had_completed_has_no_excuse(
    database_url: str, aws: "LocalAws", broken: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "NOTIFICATION", replace(NOTIFICATION, moments=(worker_process.COMMITTED,)))
    broken(f"from txbox_demo import worker_process\nworker_process.LOST_ACK_SHARE = 0.0\n{FORGETFUL}")
    report = run_demo(Plan(purchases=100, workers=2, kills=8, seed=1, database_url=database_url, own_broker=False))
    assert report.kills["notification"][worker_process.COMMITTED] >= 1
    assert not report.exact
    assert report.notices.repeated
    assert report.notices.unsure_twice == 0


LAZY = """
from txbox_demo import notification

class Lazy(notification.Notification):
    def __call__(self, message, lease):
        if message.json()["purchase_id"] != "cdnow-00007":
            super().__call__(message, lease)

notification.Notification = Lazy
"""

BELIEVING = """
from txbox_demo import notification

class Believing(notification.Notification):
    def _send(self, email):
        if email["X-Purchase-Id"] != "cdnow-00007":
            super()._send(email)

notification.Notification = Believing
"""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("script", "contradictions"),
    [(LAZY, ()), (BELIEVING, ("mails: 1 mails sent that the server does not have",))],
    ids=["a handler that swallows it", "one that believes it was sent"],
)
def test_a_mail_that_is_lost_is_seen(
    script: str, contradictions: tuple[str, ...], database_url: str, aws: "LocalAws", broken: Callable[[str], None]
) -> None:
    broken(script)
    report = run_demo(Plan(purchases=50, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))
    assert not report.exact
    assert report.notices.missing == ("cdnow-00007",)
    assert (report.notices.mails, report.notices.repeated) == (49, ())
    found = report.contradictions
    assert len(found) == len(contradictions)
    assert all(one.startswith(start) for one, start in zip(found, contradictions, strict=True))


# --- it can fail -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_without_the_inboxs_key_accounts_and_notifications_are_wrong_and_it_says_so(
    database_url: str,
    aws: "LocalAws",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    upgrade = demo_place.upgrade_database

    def upgrade_without_key(engine: Engine, *, schema: str) -> None:
        upgrade(engine, schema=schema)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {schema}.processed_message DROP CONSTRAINT processed_message_pkey")

    monkeypatch.setattr(demo_place, "upgrade_database", upgrade_without_key)
    file = tmp_path / "figures.json"
    assert run_here([*DEMO, "--purchases", "100", "--kills", "0", "--url", database_url, "--json", str(file)]) == 1
    figures = json.loads(file.read_text())
    assert figures["billing"]["received"] > 100  # nobody was killed, so because acks and answers got lost
    assert (figures["exact"], figures["adds_up"]) == (False, False)
    assert float(figures["found_dollars"]) > float(figures["expected_dollars"])
    assert figures["wrong_customers"]
    assert figures["notifications"]["repeated"]
    assert any("processed twice" in contradiction for contradiction in figures["contradictions"])
    printed = capsys.readouterr().out
    assert "THE ACCOUNTS ARE WRONG, THE NOTIFICATIONS ARE WRONG" in printed
    assert "DOES NOT ADD UP" in printed
    assert "CONTRADICTION: billing: " in printed


PUBLISHED_OUTSIDE = """
import json
from txbox_demo import billing, shop_process, worker_process

class Careless:
    def publish(self, session, *arguments, **options):
        with session.get_bind().engine.begin() as connection:
            return outbox.publish(connection, *arguments, **options)

class Noting(Careless):
    def publish(self, session, destination, body, **options):
        super().publish(session, destination, body, **options)
        with open({published!r}, "a") as file:
            file.write(json.loads(body)["purchase_id"] + "\\n")

outbox = billing.Outbox()
shop_process.DECLINED_SHARE = 0.2
shop_process.Outbox, worker_process.Outbox = Careless, Noting
"""


@pytest.mark.usefixtures("quick")
def test_what_is_published_outside_of_the_transaction_is_seen(
    database_url: str, aws: "LocalAws", broken: Callable[[str], None], tmp_path: Path
) -> None:
    published = tmp_path / "published"
    broken(PUBLISHED_OUTSIDE.format(published=str(published)))
    # One worker at a time: each of the two that are to be killed meets more messages than its life has.
    report = run_demo(Plan(purchases=100, workers=1, kills=6, seed=1, database_url=database_url, own_broker=False))
    assert not report.exact
    # Rolled back and sent all the same.
    assert report.comparison.found_cents > report.comparison.expected_cents
    assert report.shop.wrong == ()
    assert report.notices.wrong
    # Killed before its commit, billing has published, and publishes again: an order, or one that was declined.
    assert report.kills["billing"]["handling"] == 1
    twice = {purchase for purchase, times in Counter(published.read_text().split()).items() if times > 1}
    assert twice
    assert set(report.notices.repeated) == twice


FORGOTTEN_BEFORE_SENT = """
from txbox_demo import relay_process

class Hasty:
    def __init__(self, publisher):
        self.publisher = publisher

    def send(self, messages):
        return self.publisher.send([one for one in messages if one.id != "cdnow-00007"] or messages[:0])

publishers = relay_process.aws_publishers
relay_process.aws_publishers = lambda: {"sqs": Hasty(publishers()["sqs"])}
"""


@pytest.mark.usefixtures("quick")
def test_what_a_relay_forgets_without_sending_it_is_seen_and_an_effect_without_its_record_too(
    database_url: str,
    aws: "LocalAws",
    admin: Engine,
    sqs: "SQSClient",
    broken: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_tables = demo_place.create_tables

    def create_tables_with_an_account(engine: Engine) -> None:
        create_tables(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO account VALUES ('00001', 0, 0, 1)")

    broken(FORGOTTEN_BEFORE_SENT)
    monkeypatch.setattr(demo_place, "create_tables", create_tables_with_an_account)
    before = schemas(admin), queues(sqs)
    report = run_demo(Plan(purchases=50, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))
    assert not report.exact
    assert report.notices.missing == ("cdnow-00007",)
    assert report.comparison.wrong == ("00001", "00003")
    assert report.standing.backlog == 0
    assert (schemas(admin), queues(sqs)) == before


def test_a_process_that_ends_by_itself_ends_the_run(
    database_url: str, aws: "LocalAws", admin: Engine, sqs: "SQSClient", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_place, "upgrade_database", lambda *_, **__: None)  # so the processes find no tables
    monkeypatch.setattr(demo_run, "read_standing", lambda *_: Standing())
    before = schemas(admin), queues(sqs)
    with pytest.raises(TxboxError, match=r"[a-z]+ \d+ ended by itself with status 1: .*(processed|outbox)_message"):
        run_demo(Plan(purchases=50, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))
    assert (schemas(admin), queues(sqs)) == before


def test_nothing_is_given_up_after_a_single_look(
    database_url: str, aws: "LocalAws", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next count comes later the longer the last one took, and until then nothing new is known."""
    missed: list[Standing] = []
    look = read_standing

    def look_and_miss_once_what_is_on_its_way(place: Place, client: "SQSClient") -> Standing:
        standing = look(place, client)
        if standing.placed < 50 or standing.is_complete(50) or missed:
            return standing
        missed.append(standing)
        return Standing(placed=50)

    monkeypatch.setattr(demo_run, "LOST_SECONDS", 0.0)
    monkeypatch.setattr(demo_run, "read_standing", look_and_miss_once_what_is_on_its_way)
    report = run_demo(Plan(purchases=50, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))
    assert missed
    assert report.exact


def test_a_run_that_stands_still_ends_and_says_where(
    database_url: str, aws: "LocalAws", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(demo_run, "read_standing", lambda *_: Standing(placed=50, billed=7, purchases_queue=43))
    with pytest.raises(TxboxError, match=r"no progress for 0\.5 s .* 43 in the queue of billing, 7 billed"):
        run_demo(Plan(purchases=50, workers=2, kills=0, seed=1, database_url=database_url, own_broker=False))


# --- it leaves nothing behind ----------------------------------------------------------------------------------------


def forks(demo: psutil.Process) -> list[psutil.Process]:
    """The processes of all roles."""
    return [
        fork
        for child in demo.children()
        if any("fork_server" in argument for argument in child.cmdline())
        for fork in child.children()
    ]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_however_it_ends_nothing_keeps_running(on_its_own: None, number: signal.Signals, status: int) -> None:
    with Running(*DEMO, "--purchases", "5000") as running:
        running.says("processing")
        demo = psutil.Process(running.process.pid)
        wait_until(lambda: len(forks(demo)) >= 8, "two processes of each role run")
        processes = demo.children(recursive=True)
        running.signal(number)
        assert running.wait() == status
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    if status > 0:
        assert running.err[-1] == "txbox: interrupted\n"


def test_an_interrupt_leaves_a_database_and_queues_of_ones_own_clean(
    database_url: str, aws: "LocalAws", admin: Engine, sqs: "SQSClient", tmp_path: Path
) -> None:
    before = schemas(admin), queues(sqs)
    with Running(*DEMO, "--url", database_url, "--purchases", "5000", env={"TMPDIR": str(tmp_path)}) as running:
        running.says("processing")
        assert len(schemas(admin)) == len(before[0]) + 1
        assert len(queues(sqs)) == len(before[1]) + 2
        assert len(list(tmp_path.iterdir())) == 1
        running.signal(signal.SIGINT)
        assert running.wait() == 130
    assert (schemas(admin), queues(sqs)) == before
    assert list(tmp_path.iterdir()) == []
