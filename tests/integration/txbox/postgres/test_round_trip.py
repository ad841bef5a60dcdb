"""Statements that go out together, and are cut short."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from txbox.postgres.round_trip import Statement, Step, run_steps

SLEEP = Step(Statement.of("SELECT pg_catalog.pg_sleep(600)", has_plan=False))
ONE = Step(Statement.of("SELECT 1", has_plan=False))


@pytest.mark.parametrize("steps", [[SLEEP], [ONE, SLEEP, ONE]])
def test_a_connection_whose_statements_are_cancelled_can_be_used_again(schema_url: str, steps: list[Step]) -> None:
    def run(connection: Connection) -> Any:
        return run_steps(connection, steps)

    async def cut() -> object:
        engine = create_async_engine(schema_url)
        async with engine.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await connection.run_sync(run)
            with pytest.raises(DBAPIError, match="transaction is aborted"):
                await connection.exec_driver_sql("SELECT 2")
            await connection.rollback()
            found = (await connection.exec_driver_sql("SELECT 2")).scalar_one()
        await engine.dispose()
        return found

    assert asyncio.run(cut()) == 2
