"""Requests behind a pooler in transaction mode: none runs another client's statement, and all succeed."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, make_url

from support.postgres.pooled_database import SERVERS
from support.web.service import buy, served, service
from support.workers.business import Business
from txbox import Inbox


@pytest.mark.parametrize("style", ["asyncpg dependency", "async dependency", "sync dependency"])
@pytest.mark.parametrize("with_keys", [True, False])
def test_requests_meet_no_statement_of_another_client(
    pooled_urls: tuple[str, str], style: str, with_keys: bool
) -> None:
    url, through = pooled_urls
    business = Business(create_engine(url, poolclass=NullPool))
    names = [f"__asyncpg_stmt_{number:x}__" for number in range(1, 2000)] + [f"_pg3_{number}" for number in range(100)]
    direct = make_url(through).set(drivername="postgresql").render_as_string(hide_password=False)
    with ExitStack() as stack:  # each server, lent for a transaction, has what another process's driver has prepared
        for other in [stack.enter_context(psycopg.connect(direct, prepare_threshold=None)) for _ in range(SERVERS)]:
            for name in names:
                other.execute(f'PREPARE "{name}" AS INSERT INTO effect VALUES (0, $1, $2)')
    inbox = Inbox("billing", wait_seconds=30)
    with served(service(through, style, inbox=inbox, required=False)) as client, ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda number: buy(client, f"k{number % 50}" if with_keys else None, f"i{number % 50}"), range(100)
            )
        )
    assert {answer.status_code for answer in answers} == {201}
    times = 1 if with_keys else 2
    assert business.applied() == {f"i{number}": times for number in range(50)}
    assert business.balance() == 50 * times
