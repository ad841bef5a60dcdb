"""The soak: orders through outbox, relays, FIFO queue, inbox, outbox, relays, queue and leases, while all of it breaks.

Processes are killed and stopped, backends terminated, the server crashes, and the broker has faults of every kind. At
the end an independent audit must find nothing. ``TXBOX_SOAK_MINUTES`` is the length of the long form,
``TXBOX_SOAK_SEED`` the seed of either.
"""

import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from sqlalchemy import create_engine

from support.soak.audit import audit, read
from support.soak.broker import Broker
from support.soak.campaign import BUSINESS, HAPPENINGS, SETTLE_SECONDS, Campaign
from support.soak.processes import Setting
from txbox.schema import tables
from txbox_local import LocalAws, LocalPostgres
from txbox_local.postgres.directory import temporary_directory
from txbox_local.postgres.installation import find_installation

SHORT_SECONDS = 40.0
LONG_MINUTES = float(os.environ.get("TXBOX_SOAK_MINUTES", "30"))

# Commits are durable against a crash of the server, and need not be against one of the machine. What commits with
# synchronous_commit=off is written so late that a crash does lose it.
SERVER = {
    "synchronous_commit": "on",
    "wal_writer_delay": "10s",
    "max_connections": "300",
}


@pytest.fixture
def campaign(
    aws: LocalAws, tmp_path: Path, note_server: Callable[[str], None], request: pytest.FixtureRequest
) -> Iterator[Campaign]:
    """A campaign on servers of its own; the queues are those of the run's SQS."""
    seed = int(os.environ.get("TXBOX_SOAK_SEED") or random.randrange(2**32))
    note_server(f"Soak's seed: TXBOX_SOAK_SEED={seed}")
    sqs = boto3.client("sqs", endpoint_url=aws.endpoint_url)
    fifo = {"FifoQueue": "true"}
    orders = sqs.create_queue(QueueName=f"soak-orders-{seed}.fifo", Attributes=fifo)["QueueUrl"]
    mails = sqs.create_queue(QueueName=f"soak-mails-{seed}")["QueueUrl"]
    port = int(aws.endpoint_url.rsplit(":", 1)[1])
    data = temporary_directory(find_installation().user)
    with (
        LocalPostgres(data, port=free_port(), durable=False, settings=SERVER) as server,
        Broker(port, seed) as broker,
    ):
        engine = create_engine(server.url)
        with engine.begin() as connection:
            tables().metadata.create_all(connection)
            for statement in BUSINESS:
                connection.exec_driver_sql(statement)
        engine.dispose()
        if getattr(request, "param", "sqs") == "postgres":
            orders, mails = "inbox:billing", "inbox:mailing"
        setting = Setting(server.url, broker.url, orders, mails, str(tmp_path))
        yield Campaign(server, broker, sqs, setting, seed)
    sqs.close()
    shutil.rmtree(data, ignore_errors=True)


def soak(campaign: Campaign, seconds: float, note_server: Callable[[str], None]) -> None:
    campaign.run(seconds)
    engine = create_engine(campaign.setting.url)
    facts = read(engine, campaign.broker, campaign.setting)
    engine.dispose()
    wrong = audit(facts)
    summary = f"Soak of seed {campaign.seed}: {campaign.summary()}, {len(facts.letters)} parked; wrong: {len(wrong)}"
    note_server(summary)
    assert not wrong, "\n".join([summary, *wrong])
    assert not campaign.ended_by_themselves, "processes ended by themselves"
    assert not campaign.late, "processes did not end in order when they were told to"
    for what in HAPPENINGS:
        assert campaign.counts[what], f"no {what}: too short to mean something"


BOTH_ROADS = pytest.mark.parametrize("campaign", ["sqs", "postgres"], indirect=True)


@BOTH_ROADS
@pytest.mark.chaos
@pytest.mark.timeout(SHORT_SECONDS + SETTLE_SECONDS + 120)
def test_through_faults_of_every_kind_nothing_is_lost_doubled_or_out_of_order(
    campaign: Campaign, note_server: Callable[[str], None]
) -> None:
    soak(campaign, SHORT_SECONDS, note_server)


@BOTH_ROADS
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(LONG_MINUTES * 60 + 900)
def test_through_half_an_hour_of_faults_nothing_is_lost_doubled_or_out_of_order(
    campaign: Campaign, note_server: Callable[[str], None]
) -> None:
    soak(campaign, LONG_MINUTES * 60, note_server)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
