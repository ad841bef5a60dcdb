"""Sessions that have engines of their own: what a handler does is in the transaction that records its message."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.orm import Session, sessionmaker

from support.workers.business import Business, once
from support.workers.mapped import Base, Effect
from support.workers.memory_worker import make, messages, work_off
from txbox import InvalidConfiguration, Message
from txbox_workers.memory_source import MemorySource


def use(session: Session, message: Message) -> None:
    """Use a session in each way in which it looks for its engine."""
    session.add(Effect(message_id=message.id, body=message.text))
    session.flush()
    assert session.query(Effect).filter_by(message_id=message.id).count() == 1
    session.execute(insert(Effect).values(message_id=f"{message.id}, by a statement", body=""))
    session.connection().execute(insert(Effect).values(message_id=f"{message.id}, by its connection", body=""))


def routing(engine: Engine) -> Callable[..., Session]:
    class Routing(Session):
        def get_bind(self, *_: Any, **__: Any) -> Engine:
            return engine

    return Routing


FACTORIES: dict[str, Callable[[Engine], Callable[..., Session]]] = {
    "binds by class": lambda engine: sessionmaker(binds={Base: engine}),
    "binds by table": lambda engine: sessionmaker(binds={Effect.__table__: engine}),
    "an engine with options": lambda engine: sessionmaker(
        binds={Base: engine.execution_options(isolation_level="AUTOCOMMIT")}
    ),
    "get_bind": routing,
    "a session that takes no engine": lambda engine: lambda **_: Session(engine),
}


@pytest.fixture(params=list(FACTORIES))
def factory(request: pytest.FixtureRequest) -> Callable[[Engine], Callable[..., Session]]:
    return FACTORIES[request.param]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_of_the_engine_of_the_worker_they_work_in_its_transaction(
    engine: Engine, business: Business, factory: Callable[[Engine], Callable[..., Session]], batch_size: int
) -> None:
    def handle(session: Session, message: Message) -> None:
        use(session, message)
        if message.id == "bad":
            raise ValueError

    source = MemorySource(messages("a", "bad", "c"))
    work_off(source, engine, handle, session_factory=factory(engine), max_attempts=2, batch_size=batch_size)
    ways = ("", ", by a statement", ", by its connection")
    assert business.applied() == once(f"{name}{way}" for name in "ac" for way in ways)
    assert business.recorded() == {"a", "c"}
    assert business.letters() == {"bad": "failed"}


@pytest.mark.parametrize("batch", [False, True])
def test_of_another_engine_they_are_refused(
    engine: Engine,
    schema_url: str,
    business: Business,
    factory: Callable[[Engine], Callable[..., Session]],
    batch: bool,
) -> None:
    other = create_engine(schema_url)
    wrong: list[BaseException] = []

    def swallow(session: Session, given: Any) -> None:
        try:
            use(session, given[0] if batch else given)
        except InvalidConfiguration as error:
            wrong.append(error)
            raise

    handler: dict[str, Any] = {"batch_handler": swallow} if batch else {"handler": swallow}
    work_off(MemorySource(messages("a")), engine, max_attempts=2, session_factory=factory(other), **handler)
    other.dispose()
    assert business.applied() == {}
    assert business.recorded() == set()
    assert business.letters() == {"a": "failed"}, "it is not lost"
    assert len(wrong) == 2
    assert "an engine of its own" in str(wrong[0])
    assert "***" in str(wrong[0]), "without its password"


def test_of_the_engine_of_the_worker_for_another_schema_they_are_refused(engine: Engine, business: Business) -> None:
    tenant = engine.execution_options(schema_translate_map={None: "no_such_schema"})
    wrong: list[BaseException] = []

    def handle(session: Session, message: Message) -> None:
        try:
            use(session, message)
        except InvalidConfiguration as error:
            wrong.append(error)
            raise

    for name, factory in (("a", sessionmaker(binds={Base: tenant})), ("b", routing(tenant))):
        work_off(MemorySource(messages(name)), engine, handle, max_attempts=1, session_factory=factory)
    assert ["schema_translate_map" in str(error) for error in wrong] == [True, True]
    assert (business.applied(), business.recorded()) == ({}, set())
    work_off(MemorySource(messages("c")), tenant, lambda session, _: session.connection(), session_factory=factory)
    assert business.recorded() == {"c"}


def test_a_factory_for_another_schema_than_the_engines_is_refused_before_a_message_is_taken(engine: Engine) -> None:
    tenant = engine.execution_options(schema_translate_map={None: "tenant"})
    with pytest.raises(InvalidConfiguration, match=r"session_factory .*schema_translate_map"):
        make(MemorySource([]), engine, use, session_factory=sessionmaker(tenant))
    for factory in (sessionmaker(tenant), sessionmaker(engine)):
        make(MemorySource([]), tenant, use, session_factory=factory)


def test_two_phases_are_refused_before_a_message_is_taken(engine: Engine) -> None:
    with pytest.raises(InvalidConfiguration, match="session_factory has twophase"):
        make(MemorySource([]), engine, use, session_factory=sessionmaker(twophase=True))
    worker = make(MemorySource([]), engine, use, session_factory=lambda **named: Session(**named, twophase=True))
    with pytest.raises(InvalidConfiguration, match="twophase"):
        worker.start()
