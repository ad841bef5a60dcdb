"""Many ask for one message at the same moment: one gets it."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from botocore.config import Config

from support.txbox.leases import Store, acquired
from txbox import LeaseLost
from txbox.leases import Acquisition, LeaseState
from txbox_aws.dynamodb import DynamoDBLedger
from txbox_local import LocalAws

THREADS = 32


@pytest.fixture(scope="module")
def clients(aws: LocalAws) -> Iterator[list[Any]]:
    made = [boto3.client("dynamodb", config=Config(max_pool_connections=THREADS)) for _ in range(4)]
    yield made
    for client in made:
        client.close()


@pytest.mark.parametrize("rounds", [10, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_of_32_who_ask_at_once_for_what_has_run_out_exactly_one_gets_it(
    store: Store, clients: list[Any], rounds: int
) -> None:
    """Half of the threads share a ledger with others, as a worker's threads do; half have one each."""
    table = store.arguments["table"]
    shared = DynamoDBLedger("mailing", table=table, client=clients[0])
    ledgers = [
        shared if number % 2 else DynamoDBLedger("mailing", table=table, client=clients[number % 4])
        for number in range(THREADS)
    ]
    start = threading.Barrier(THREADS)

    def ask(ledger: DynamoDBLedger, message_id: str) -> Acquisition:
        start.wait(60)
        return ledger.acquire(message_id)

    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(rounds):
            message_id = f"m{number}"
            late = acquired(shared, message_id)
            store.expire(message_id)
            found = list(pool.map(ask, ledgers, [message_id] * THREADS))
            (owner,) = [each.lease for each in found if each.lease is not None]
            assert sum(each.state is LeaseState.IN_FLIGHT for each in found) == THREADS - 1
            assert owner.attempt == 2
            assert owner.fence > late.fence
            with pytest.raises(LeaseLost):
                shared.complete(late)
            ledgers[0].complete(owner)
            assert ledgers[1].acquire(message_id).state is LeaseState.COMPLETED


def test_threads_that_renew_and_complete_at_once_leave_a_completed_message(store: Store) -> None:
    ledger = store.ledger()
    for number in range(10):
        lease = acquired(ledger, f"m{number}")
        start = threading.Barrier(6)

        def renew(lease: Any = lease, start: threading.Barrier = start) -> None:
            start.wait(20)
            with contextlib.suppress(LeaseLost):  # it was completed first
                ledger.renew(lease)

        with ThreadPoolExecutor(6) as pool:
            renewals = [pool.submit(renew) for _ in range(5)]
            start.wait(20)
            ledger.complete(lease, b"done")
            for renewal in renewals:
                renewal.result()
        again = ledger.acquire(f"m{number}")
        assert (again.state, again.result) == (LeaseState.COMPLETED, b"done")
