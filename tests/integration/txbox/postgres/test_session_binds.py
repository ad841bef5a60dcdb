"""A session of the host's with several engines: what we write and its effects are in one transaction, or it is told."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from support.workers.business import Business
from support.workers.mapped import Base, Effect
from txbox import Inbox, InvalidConfiguration, Outbox
from txbox.coroutines import AsyncInbox, AsyncOutbox, AsyncWatermarks
from txbox.watermarks import Watermarks


def effect() -> Effect:
    return Effect(message_id="a", body="")


Write = Callable[[Any], object]

WRITES: dict[str, Write] = {
    "record": lambda session: Inbox("billing").record(session, "a"),
    "record_many": lambda session: Inbox("billing").record_many(session, ["a"]),
    "publish": lambda session: Outbox().publish(session, "test:queue", b"{}"),
    "watermark": lambda session: Watermarks("billing").advance(session, "account", "a", 1),
}


def by_class(engine: Engine, other: Engine) -> Any:
    return Session(engine, binds={Base: other})


def by_get_bind(engine: Engine, other: Engine) -> Any:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, *_: Any, **__: Any) -> Engine:
            return engine if mapper is None else other

    return Routing()


def scoped(engine: Engine, other: Engine) -> Any:
    return scoped_session(sessionmaker(engine, binds={Base: other}))


@pytest.fixture(params=[by_class, by_get_bind, scoped])
def session_of(request: pytest.FixtureRequest) -> Callable[[Engine, Engine], Any]:
    made: Callable[[Engine, Engine], Any] = request.param
    return made


@pytest.fixture(params=list(WRITES))
def write(request: pytest.FixtureRequest) -> Write:
    return WRITES[request.param]


@pytest.fixture
def other(schema_url: str) -> Iterator[Engine]:
    """Another engine of the same database: an effect over it can be seen beside those of the first."""
    other = create_engine(schema_url)
    yield other
    other.dispose()


def rows(business: Business) -> list[int]:
    """How many rows there are: of the effect, and of what was written."""
    tables = ("effect", "processed_message", "outbox_message", "aggregate_watermark")
    return [business.rows(f"SELECT count(*) FROM {table}")[0] for table in tables]


def test_an_effect_over_another_connection_is_refused(
    engine: Engine, other: Engine, business: Business, session_of: Callable[[Engine, Engine], Any], write: Write
) -> None:
    session = session_of(engine, other)
    write(session)
    session.add(effect())
    with pytest.raises(InvalidConfiguration, match="a second connection"):
        session.flush()
    session.rollback()
    session.add(effect())
    session.flush()
    with pytest.raises(InvalidConfiguration, match="a second connection"):
        write(session)
    session.rollback()
    assert rows(business) == [0, 0, 0, 0]
    with session.begin():  # its own business, in a transaction in which we write nothing
        session.connection()
        session.add(effect())
    assert rows(business) == [1, 0, 0, 0]
    session.close()


def test_one_engine_is_one_connection_however_it_is_chosen(
    engine: Engine, business: Business, session_of: Callable[[Engine, Engine], Any], write: Write
) -> None:
    session = session_of(engine, engine)
    for end in ("rollback", "commit"):
        session.add(effect())
        session.flush()
        with session.begin_nested():
            write(session)
        session.add(effect())
        getattr(session, end)()
    session.close()
    effects, *written = rows(business)
    assert (effects, sum(written)) == (2, 1)


def test_the_connection_of_the_effect_may_be_given(
    engine: Engine, other: Engine, business: Business, write: Write
) -> None:
    with by_class(engine, other) as session, session.begin():
        session.add(effect())
        write(session.connection(bind_arguments={"mapper": Effect}))
    effects, *written = rows(business)
    assert (effects, sum(written)) == (1, 1)


@pytest.mark.parametrize(
    "write",
    [
        lambda session: AsyncInbox("billing").record(session, "a"),
        lambda session: AsyncOutbox().publish(session, "test:queue", b"{}"),
        lambda session: AsyncWatermarks("billing").advance(session, "account", "a", 1),
    ],
    ids=["record", "publish", "watermark"],
)
def test_an_effect_of_an_async_session_over_another_connection_is_refused(
    schema_url: str, business: Business, write: Callable[[AsyncSession], Awaitable[Any]]
) -> None:
    async def work() -> None:
        engine, other = create_async_engine(schema_url), create_async_engine(schema_url)
        async with AsyncSession(engine, binds={Base: other}) as session:
            await write(session)
            session.add(effect())
            with pytest.raises(InvalidConfiguration, match="a second connection"):
                await session.flush()
        for one in (engine, other):
            await one.dispose()

    asyncio.run(work())
    assert rows(business) == [0, 0, 0, 0]
