"""The main job: order, relay, bill, relay, notify, kill, and reckon."""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

from txbox import TxboxError
from txbox.postgres.urls import DATABASE_URL_VARIABLE, database_engine, database_url
from txbox.status import read_status
from txbox_aws.sqs import sqs_client
from txbox_demo import billing, notification
from txbox_demo.accounting import account_for, account_for_sends, compare, compare_mails
from txbox_demo.billing import read_accounts
from txbox_demo.crew import RELAY, SHOP, Crew
from txbox_demo.fork_server import ForkServer
from txbox_demo.journal import read_diaries, read_journals, read_notes
from txbox_demo.last_act import run_last_act
from txbox_demo.notification import read_mail
from txbox_demo.orders import Orders
from txbox_demo.place import Place, open_place
from txbox_demo.plan import Plan, Progress
from txbox_demo.purchases import read_purchases, totals
from txbox_demo.relay_process import HANDED
from txbox_demo.report import Report, Shop
from txbox_demo.shop import read_orders
from txbox_demo.shop_process import DECLINED
from txbox_demo.standing import Standing, read_standing

if TYPE_CHECKING:
    from types_boto3_sqs import SQSClient

    from txbox_local import LocalSmtp

__all__ = ["run_demo"]

VISIBILITY_SECONDS = 2
"""Short, so that what a killed worker held comes again soon."""

STALL_SECONDS = 90.0
"""Without any progress for that long, something is broken."""

LOST_SECONDS = 3.0 * VISIBILITY_SECONDS
"""Nothing waits anywhere, and something is missing: if that lasts, it is lost, and the reckoning says what."""

REFUSED_MAIL_SHARE = 0.02
"""Of all mails: refused by the server before it has their text, to be tried again later."""

LOOK_SECONDS = 0.1
"""Between looks at the processes, a database and queues, which have no signal in common."""

COUNT_PAUSE = 20
"""Between counts of how far it is, in times of what the last count took."""


def run_demo(plan: Plan, on_progress: Callable[[Progress], None] = lambda _: None) -> Report:
    """Run the main job.

    Args:
        plan: what to do.
        on_progress: called whenever it is further.

    Raises:
        TxboxError: it could not be run to its end, for a reason that the message gives.
    """
    progress = Progress()

    def say(**changes: Any) -> None:
        for name, value in changes.items():
            setattr(progress, name, value)
        on_progress(progress)

    say(stage="starting servers")
    with ExitStack() as cleanup:
        server = ForkServer()
        cleanup.callback(server.stop)
        directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="txbox-demo-")))
        smtp = _smtp(plan, cleanup)
        services = _services(plan, cleanup)
        with _aws_environment(services):
            client = sqs_client("")
        cleanup.callback(client.close)
        url = database_url(services[DATABASE_URL_VARIABLE])
        admin = database_engine(url)
        cleanup.callback(admin.dispose)
        say(stage="creating tables and queues")
        place = open_place(admin, url, client, cleanup, keep=plan.keep)
        orders = Orders(
            role="",
            database_url=place.url.render_as_string(hide_password=False),
            purchases_url=place.purchases_url,
            notifications_url=place.notifications_url,
            purchases=plan.purchases,
            visibility_seconds=VISIBILITY_SECONDS,
            smtp_port=smtp.port,
            directory=str(directory),
            environment=services,
            seed=plan.seed,
        )
        crew = Crew(server, plan.teams(), orders)
        begun = time.monotonic()
        say(stage="processing")
        standing = _work(plan, crew, place, client, say)
        say(stage="draining")
        crew.stop()
        seconds = time.monotonic() - begun
        say(stage="reckoning")
        report = _reckon(plan, crew, place, smtp, directory, standing=standing, seconds=seconds)
        if not plan.last_act:
            return report
        backstage = directory / "last-act"
        backstage.mkdir()
        place = open_place(admin, url, client, cleanup, keep=plan.keep)
        orders = replace(
            orders,
            database_url=place.url.render_as_string(hide_password=False),
            purchases_url=place.purchases_url,
            notifications_url="",
            smtp_port=0,
            directory=str(backstage),
        )
        last_act = run_last_act(place, client, server, orders, say=lambda stage: say(stage=stage))
        return replace(report, last_act=last_act)


def _work(plan: Plan, crew: Crew, place: Place, client: "SQSClient", say: Callable[..., None]) -> Standing:
    """Tend the crew until everything is through the chain, or what is missing is lost."""
    standing, count_at = Standing(), 0.0
    seen, changed_at = (standing, -1), time.monotonic()
    while True:
        crew.tend()
        now = time.monotonic()
        if now >= count_at:
            standing = read_standing(place, client)
            # Counting reads the whole inbox; however large that is, it gets a small share of the time.
            count_at = time.monotonic() + COUNT_PAUSE * (time.monotonic() - now)
            if seen != (standing, crew.kills_total):
                seen, changed_at = (standing, crew.kills_total), now
            # Judged by two looks that far apart, never by the age of one look.
            unchanged_seconds = now - changed_at
            all_placed = crew.is_done(SHOP)
            if all_placed and standing.is_complete(plan.purchases):
                return standing
            if all_placed and not standing.backlog and unchanged_seconds > LOST_SECONDS:
                return standing
            if unchanged_seconds > STALL_SECONDS:
                raise TxboxError(
                    f"no progress for {STALL_SECONDS:g} s with {plan.purchases:,} purchases: {standing}; "
                    "run again with --url and --keep, and look with `txbox status` and `txbox dead-letters list`"
                )
        say(standing=standing, kills=crew.kills_total)
        time.sleep(LOOK_SECONDS)


def _reckon(
    plan: Plan, crew: Crew, place: Place, smtp: "LocalSmtp", directory: Path, *, standing: Standing, seconds: float
) -> Report:
    with place.engine.connect() as connection:
        processed = {
            subscriber: frozenset(connection.execute(statement, {"subscriber": subscriber}).scalars())
            for subscriber, statement in _PROCESSED.items()
        }
        orders, accounts = read_orders(connection), read_accounts(connection)
    status = read_status(place.engine)
    by_file = {purchase.event_id: purchase for purchase in read_purchases(plan.purchases)}
    wrong = [order for order in by_file.keys() | orders.keys() if by_file.get(order) != orders.get(order)]
    handed = read_notes(directory, RELAY.name)[HANDED]
    declined = read_notes(directory, SHOP.name)[DECLINED]
    return Report(
        plan=plan,
        shop=Shop(placed=len(orders), rolled_back=sum(declined.values()), wrong=tuple(sorted(wrong))),
        sends=account_for_sends(handed, by_file, processed[notification.SUBSCRIBER]),
        deliveries={
            subscriber: account_for(read_journals(directory, subscriber), processed[subscriber])
            for subscriber in processed
        },
        kills={team.role.name: dict(team.killed) for team in crew.teams},
        processes_started=crew.started,
        comparison=compare(totals(by_file.values()), accounts),
        notices=compare_mails(
            by_file.values(),
            [read_mail(accepted) for accepted in smtp.accepted],
            read_diaries(directory, notification.SUBSCRIBER),
            crew.killed,
            refused=smtp.refused,
        ),
        standing=standing,
        dead=sum(sum(line.dead_letters.values()) for line in status.subscribers),
        seconds=seconds,
        schema=place.schema,
        queue_urls=place.queue_urls,
    )


def _services(plan: Plan, cleanup: ExitStack) -> dict[str, str]:
    """Start what is to be embedded, and return the variables that lead to everything."""
    environment: dict[str, str] = {}
    if plan.database_url is None:
        from txbox_local import LocalPostgres

        environment[DATABASE_URL_VARIABLE] = cleanup.enter_context(LocalPostgres()).url
    else:
        environment[DATABASE_URL_VARIABLE] = plan.database_url
    if plan.own_broker:
        from txbox_local import LocalAws

        environment.update(cleanup.enter_context(LocalAws()).environment())
    return environment


def _smtp(plan: Plan, cleanup: ExitStack) -> "LocalSmtp":
    """Start the server that gets the mails: always one of our own, so that nobody is bothered."""
    from txbox_local import LocalSmtp

    chance = random.Random(plan.seed)  # noqa: S311 - choices of the demo, no secrets
    return cleanup.enter_context(LocalSmtp(refuses=lambda: chance.random() < REFUSED_MAIL_SHARE))


@contextmanager
def _aws_environment(environment: dict[str, str]) -> Iterator[None]:
    """Let boto3 in this process see the same variables as the workers."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in environment.items() if name.startswith("AWS_")})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_PROCESSED = {
    billing.SUBSCRIBER: text(
        "SELECT message_id FROM processed_message WHERE subscriber_id = :subscriber AND dead_letter_id IS NULL"
    ),
    notification.SUBSCRIBER: text(
        "SELECT message_id FROM message_lease WHERE subscriber_id = :subscriber AND completed_at IS NOT NULL"
    ),
}
"""What each service has processed: by its inbox, or by its ledger."""
